"""Starts a worker of Ray in the warm Python: stands for Ray's own script, which begins with a cold one."""

import json
import os
import sys

PYTHON = "AG_WARM_PYTHON"  # the variable that names it

if __name__ == "__main__":
    words, job = [], {}
    for word in sys.argv[1:]:
        name, _, value = word.partition("=")
        if name == "--serialized-runtime-env-context":
            job = json.loads(value)
        elif name != "--language":
            words.append(word)
    os.environ.update(job.get("env_vars") or {})
    os.execv(os.environ[PYTHON], [os.environ[PYTHON], *words])
