# Sourced by launch_4x4090.sh and slurm/train.sbatch: the folder of their run, and whether it begins or goes on.

# run_folder RECIPE NAME [key=value ...] prints the folder of a run of ag.fit with this name.
run_folder() {
    local recipe output=runs word
    recipe="$(basename "$1")"
    recipe="${recipe%.yaml}"
    for word in "${@:3}"; do
        case "$word" in output=*) output="${word#*=}" ;; esac # of several the last one counts, as in Python
    done
    echo "$output/${recipe%.yml}/$2"
}

# start_or_resume FOLDER [key=value ...] sets the array `start`: resume=FOLDER if there is a checkpoint, else the words.
start_or_resume() {
    start=("${@:2}")
    if compgen -G "$1/checkpoints/step=*.ckpt" >/dev/null; then
        start=("resume=$1")
    elif [ -d "$1" ]; then # it ended before its first checkpoint
        mv "$1" "$1.$(date +%s)"
    fi
}
