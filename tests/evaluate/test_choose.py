"""``ag.choose`` from rows to the file, and the commands that take the file."""

import json
import random
from dataclasses import asdict
from statistics import fmean

import pytest

import ag
from ag.choose import ChooseConfig, main
from ag.commands.generate import GenerateConfig
from ag.commands.serve import ServeConfig
from ag.config.choice import Choice
from ag.errors import UserError
from ag.evaluate.choose import choose
from ag.evaluate.tasks import make
from ag.evaluate.tasks.own import Own
from ag.gates import export
from ag.vllm.settings import Settings
from tests.support.exports import make_adapter, make_gates
from tests.support.refused import names, refuses

SHARES = [0.8, 0.5, 0.25]


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    """A file of 30 contexts with a question each, of different lengths."""
    file, rng = tmp_path_factory.mktemp("rows") / "rows.jsonl", random.Random(0)
    letters = ["".join(rng.choices("abcdefgh ", k=rng.randint(50, 70))) for _ in range(30)]
    records = [{"context": text, "question": f"{text[:9]}?", "answer": text[9:14]} for text in letters]
    file.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(file)


@pytest.fixture
def config(rows, tiny_folder, tmp_path):
    """`config(**changes)`: two policies at three shares."""
    values = {
        "model": str(tiny_folder),
        "data": rows,
        "loss": 0.2,
        "policies": ["knorm", "h2o"],
        "shares": SHARES,
        "output": str(tmp_path / "choice.json"),
    }
    return lambda **changes: ChooseConfig(**values | changes)


@pytest.fixture
def words(config):
    """`words(**changes)`: the words of the command of such a configuration."""

    def make_words(**changes):
        settings = config(**changes)
        listed = ("model", "data", "loss", "output", *changes)
        values = {name: getattr(settings, name) for name in dict.fromkeys([*listed, "policies", "shares"])}
        return [f"{name}={str(value).replace(chr(39), '').replace(' ', '')}" for name, value in values.items()]

    return make_words


@pytest.fixture
def by_share(monkeypatch):
    """Answers cost the evicted share: under h2o half of it, and everything below a share of 0.4."""

    def answer(task, model, tokenizer, cache, last_hidden, sample):
        evicted = 1 - cache.kept_share()
        if "h2o" in repr(cache.policy):
            evicted = evicted / 2 if evicted < 0.6 else 1.0
        return 3 + evicted, {}

    monkeypatch.setattr(Own, "answer", answer)


def test_costs_are_means_of_clipped_differences_to_the_full_cache(config, rows, tiny_llama, tiny_tokenizer):
    told = []
    decision = choose(config(shares=[0.25], samples=16), told.append)
    assert len(told) == 2 and "16 rows (5 to search, 11 to test)" in told[0]
    samples = make("own", rows).load(tiny_tokenizer, 16, 512).samples
    random.Random(0).shuffle(samples)
    policies, scores = [ag.policy("full"), ag.policy("knorm", 0.25), ag.policy("h2o", 0.25)], [[], [], []]
    for index, outcome in make("own", rows).run(tiny_llama(), tiny_tokenizer, policies, samples):
        scores[index].append(outcome.score)
    for candidate, own in zip(decision.candidates, scores[1:], strict=True):
        costs = [min(max(score - full, -0.5), 0.5) for full, score in zip(scores[0], own, strict=True)]
        assert candidate.trial.search == pytest.approx(costs[:5], abs=1e-5)
        assert candidate.trial.costs == pytest.approx(costs[5 : 5 + len(candidate.trial.costs)], abs=1e-5)
        assert candidate.cost == pytest.approx(fmean(candidate.trial.costs or candidate.trial.search))
        assert max(costs) > 0.01


def test_the_cheaper_policy_at_its_smallest_share_is_written(words, tiny_folder, by_share, tmp_path, capsys):
    assert main(words(loss=0.35)) == 0
    out = capsys.readouterr().out
    assert "h2o at 0.5" in out and f"choice={tmp_path / 'choice.json'}" in out.replace("\n", "")
    content = json.loads((tmp_path / "choice.json").read_text())
    assert Choice.read(str(tmp_path / "choice.json")) == Choice(str(tiny_folder), "h2o", 0.5)
    table = {(row["policy"], row["share"]): row for row in content["table"]}
    assert [*table] == [("full", 1.0), *((name, share) for name in ("knorm", "h2o") for share in SHARES)]
    costs = [table["h2o", share]["cost"] for share in SHARES]
    assert costs == [pytest.approx(0.1, abs=0.01), pytest.approx(0.25, abs=0.01), 0.5]  # the last one is clipped
    assert [table["h2o", share]["holds"] for share in SHARES] == [True, True, False]
    assert table["h2o", 0.5]["below"] == pytest.approx(0.35) and table["h2o", 0.5]["rows"] < content["tested_rows"] + 1
    # the search leaves knorm out, which holds at 0.8 alone
    assert all((table["knorm", share]["rows"], table["knorm", share]["below"]) == (9, None) for share in SHARES)
    sizes = [table["h2o", share]["mib_per_1000_tokens"] for share in SHARES]
    assert sizes == sorted(sizes, reverse=True) and table["full", 1.0]["mib_per_1000_tokens"] >= sizes[0]
    fits = [table["h2o", share]["requests"] for share in SHARES]
    assert fits == sorted(fits) and (content["clip"], content["confidence"]) == (0.5, 0.9)


def test_a_policy_whose_protected_tokens_exceed_the_share_is_ranked_by_what_it_keeps(config, monkeypatch):
    """snapkv keeps the last 32 tokens of rows with some 60, and costs no less than h2o with half of them."""
    monkeypatch.setattr(Own, "answer", lambda task, model, tokenizer, cache, last_hidden, sample: (3.0, {}))
    told = []
    decision = choose(config(policies=["snapkv", "h2o"], shares=[0.5, 0.1]), told.append)
    held = {(one.label, one.trial.share): one.holds for one in decision.candidates}
    assert held["h2o", 0.1] and (decision.chosen.label, decision.chosen.trial.share) == ("h2o", 0.1)
    assert [line.partition(" keeps")[0] for line in told if "protected" in line] == ["snapkv at 0.5", "snapkv at 0.1"]
    decision = choose(config(policies=["snapkv", "h2o"], shares=[0.1]), told.append)
    by_label = {one.label: one.trial.size for one in decision.candidates}
    assert by_label["h2o"] == 0.1 and by_label["snapkv"] > 0.4


def test_nothing_holds(words, by_share, tmp_path, capsys):
    file = tmp_path / "new" / "folder" / "choice.json"
    assert main(words(shares=[0.25], loss=0.2, output=str(file))) == 1
    assert "nothing holds" in capsys.readouterr().out
    assert json.loads(file.read_text())["choice"] is None
    with refuses(UserError, "choice.json", "policy=full"):
        Choice.read(str(file))


def test_lost_score_is_a_cost(config):
    """Hits of needles: a random model never hits, so that nothing is lost."""
    options = {"lengths": [300], "repeats": 5, "depths": [0.5]}
    decision = choose(
        config(
            data=None,
            task="needle_single",
            task_options=options,
            loss=0.45,
            confidence=0.6,
            policies=["knorm"],
            shares=[0.5],
        ),
        lambda line: None,
    )
    [candidate] = decision.candidates
    assert decision.test.clip == 1.0 and candidate.cost == 0.0 and candidate.holds


def test_rows_that_cannot_show_it_are_refused_before_the_first_is_read(words, capsys, monkeypatch):
    monkeypatch.setattr(Own, "run", lambda *_: pytest.fail("a row was read"))
    assert main(words(loss=0.02)) == 2
    names(capsys.readouterr().err, "21 rows", "loss=0.02", "clip=0.5", "at least 60")
    assert main(words(loss=0.5)) == 2
    names(capsys.readouterr().err, "loss=0.5", "clip=0.5")


def test_answers_of_one_token_are_rows_if_a_policy_can_change_them(config, tmp_path):
    """Prompts of 24 tokens, so that eviction acts after blocks of 16; after the prompt it is too late."""
    file = tmp_path / "short.jsonl"
    texts = [{"context": f"{'abcd' * 5}{number:02}", "question": "?", "answer": "y"} for number in range(40)]
    file.write_text("".join(json.dumps(text) + "\n" for text in texts))
    given = {"data": str(file), "task_options": {"question": "before"}, "policies": ["knorm"], "shares": [0.5]}
    with refuses(UserError, "no row can be measured", "40 with answers of one token", "schedule=blocks:m"):
        choose(config(**given), print)
    told = []
    decision = choose(config(**given, schedule="blocks:16", loss=0.3), told.append)
    assert decision.num_search == 12 and "left out" not in " ".join(told)
    assert any(decision.candidates[0].trial.search)


def test_rows_that_are_left_out_are_told_first(config, tmp_path):
    """Also if no row or too few rows are left."""
    file, told = tmp_path / "long.jsonl", []
    given = {"data": str(file), "max_tokens": 30}
    text = {"context": "a" * 40, "question": "?", "answer": "yes"}
    file.write_text(json.dumps(text) + "\n")
    with refuses(UserError, "no row can be measured", "1 too long"):
        choose(config(**given), told.append)
    file.write_text("".join(json.dumps(each) + "\n" for each in (text, text | {"context": "a"})))
    with refuses(UserError, "0 rows are left for the test", "rows or more, or a lower clip"):  # and no larger loss
        choose(config(**given), told.append)
    assert told == ["rows that are left out: 1 too long"]


def test_a_folder_that_cannot_be_made_is_refused_before_the_first_row_is_read(words, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(Own, "run", lambda *_: pytest.fail("a row was read"))
    (tmp_path / "file").touch()
    assert main(words(loss=0.35, output=str(tmp_path / "file" / "choice.json"))) == 2
    names(capsys.readouterr().err, "output", "file/choice.json")
    (tmp_path / "folder.json").mkdir()
    assert main(words(loss=0.35, output=str(tmp_path / "folder.json"))) == 2
    names(capsys.readouterr().err, "folder.json", "expected a file")


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"data": None}, ["data=FILE", "task=NAME"]),
        ({"task": "ppl"}, ["data=FILE", "task=NAME"]),
        ({"shares": [1.0]}, ["shares=[1.0]"]),
        ({"policies": ["full"]}, ["full", "budget"]),
        ({"policies": ["h3o"]}, ["h3o", "h2o"]),
        ({"output": "choice.txt"}, ["choice.txt", ".json"]),
        ({"data": ".", "output": "choice.json"}, ["output=choice.json", "data=."]),
    ],
)
def test_what_is_refused(changes, parts, config):
    with refuses(UserError, *parts):
        config(**changes).check()


def test_a_group_of_tasks_is_refused(config, words, capsys):
    given = {"data": None, "task": "needle_books"}
    with refuses(UserError, "needle_books", "needle_books_1, needle_books_4, needle_books_8"):
        choose(config(**given), print)
    assert main([*(word for word in words() if not word.startswith("data=")), "task=needle_books", "--dry-run"]) == 2
    names(capsys.readouterr().err, "needle_books_1", "name one of them")


def test_the_shipped_gates_of_the_model_take_part(config):
    assert config(model="smollm2", policies=[]).policies == ["gates:smollm2", "snapkv", "keydiff"]
    assert config(policies=[]).policies == ["snapkv", "keydiff"]
    assert config(model="smollm2", adapter="LORA", policies=[]).policies == ["snapkv", "keydiff"]


def test_gates_without_the_adapter_are_refused(config, tmp_path, monkeypatch):
    """A choice names one export: commands that take it would run these gates on a model without the adapter."""
    monkeypatch.setattr(Own, "run", lambda *_: pytest.fail("a row was read"))
    export.save(tmp_path / "gates", make_gates(), base_model="tiny")
    export.save_adapter(tmp_path / "lora", make_adapter(), base_model="tiny")
    given = {"adapter": str(tmp_path / "lora"), "policies": [f"gates:{tmp_path / 'gates'}"]}
    with refuses(UserError, "adapter=", "one export", str(tmp_path / "gates")):
        choose(config(**given), print)


@pytest.fixture
def chosen(tmp_path):
    """`chosen(**changes)`: a file of a choice."""

    def write(**changes):
        choice = asdict(Choice("smollm2", "snapkv", 0.3, options={"window": 16})) | changes
        (tmp_path / "choice.json").write_text(json.dumps({"choice": choice}))
        return str(tmp_path / "choice.json")

    return write


@pytest.mark.parametrize("command", [GenerateConfig, ServeConfig])
def test_commands_take_the_file(command, chosen):
    file = chosen(schedule="every")
    config = command(choice=file)
    assert (config.model, config.policy, config.budget, config.schedule) == ("smollm2", "snapkv", 0.3, "every")
    assert config.options == {"window": 16} and str(config.spec()) == "snapkv"
    assert command(choice=file, model="other").model == "other"
    for name, value in (("policy", "h2o"), ("budget", 0.5), ("gates", "smollm2"), ("schedule", "steps:8")):
        with refuses(UserError, f"choice={file}", f"{name}={value}"):
            command(choice=file, **{name: value})
    for name, value in (("revision", "abc"), ("quantization", "nf4")):
        with refuses(UserError, f"{name}={value}", "ag.EvictionCache"):
            command(choice=chosen(**{name: value}))


def test_vllm_takes_the_file(chosen):
    file = chosen(policy="gates:smollm2", options={})
    assert Settings.parse({"ag": {"choice": file}}, {}) == Settings("gates:smollm2", 0.3)
    with refuses(UserError, "ag", "choice"):
        Settings.parse({"ag": {"choice": file, "budget": 0.5}}, {})
    adapter = {"policy": "knorm", "options": {}, "gates": "EXPORT"}
    for changes, named in (({}, "snapkv"), ({"policy": "h2o", "options": {}}, "h2o"), (adapter, "EXPORT")):
        with refuses(UserError, named):
            Settings.parse({"ag": {"choice": chosen(**changes)}}, {})


@pytest.mark.parametrize(
    ("name", "value"),
    [("policy", 5), ("model", None), ("budget", "0.3"), ("schedule", None), ("options", [1]), ("gates", 5)],
)
def test_a_choice_with_a_value_of_another_type_is_refused(name, value, chosen):
    with refuses(UserError, "choice.json", f"{name}={value!r}"):
        GenerateConfig(choice=chosen(**{name: value}))


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "choice"),
        ("[" * 100_000, "choice"),
        ("[]", "key choice"),
        ('{"loss": 1}', "key choice"),
        ('{"choice": {"policy": "h2o"}}', "budget"),
    ],
)
def test_a_file_that_is_no_choice_is_refused(text, named, tmp_path):
    (tmp_path / "choice.json").write_text(text)
    with refuses(UserError, "choice.json", named):
        Choice.read(str(tmp_path / "choice.json"))
    with refuses(UserError, "nowhere.json"):
        Choice.read(str(tmp_path / "nowhere.json"))
