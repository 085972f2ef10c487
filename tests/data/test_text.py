import copy
import itertools

import pytest
import torch
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

import ag.data
from ag.data.rules import ROLES, RULES
from ag.data.sources import DataError
from ag.data.text import REPEAT_PROMPT
from tests.support.refused import names, refuses

WORDS = """
the quick brown fox jumps over a lazy dog near an old bridge while rain falls on quiet streets
""".split()  # noqa: SIM905
SMALL = {"prompt_min": 8, "prompt_max": 80, "continuation": 4, "max_length": 100}


def document(number, words):
    return " ".join(WORDS[(number * 7 + i * (1 + number % 3)) % len(WORDS)] for i in range(words))


DOCUMENTS = [document(i, words) for i, words in enumerate([5, 40, 200, 15, 90, 3, 400, 60])]


@pytest.fixture
def corpus(tmp_path, write):
    write(tmp_path / "corpus", "train", [{"text": text} for text in DOCUMENTS])
    write(tmp_path / "corpus", "validation", [{"text": text} for text in DOCUMENTS])
    return str(tmp_path)


def build(make_config, tokenizer, root, context=10_000, seed=0, **data):
    config = make_config(**{"kind": "text", "name": "corpus", "root": root, "batch_size": 2, **SMALL} | data)
    config.seed = seed
    return ag.data.build(config.data, config.seed, tokenizer, context)


def plain(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def test_packing_loses_and_repeats_no_token(make_config, corpus, tokenizer):
    module, length = build(make_config, tokenizer, corpus, 33, packing="packed"), 33
    assert [len(row.tokens) for row in module.train_rows[:-1]] == [length] * (len(module.train_rows) - 1)
    packed = list(itertools.chain.from_iterable(row.tokens.tolist() for row in module.train_rows))
    assert packed == [token for text in DOCUMENTS for token in [*plain(tokenizer, text), tokenizer.eos_token_id]]
    batch = next(iter(module.train_dataloader()))
    assert set(batch) == {"input_ids", "attention_mask", "labels"}
    assert batch["labels"].tolist() == batch["input_ids"].tolist()


def test_windows_follow_each_other_through_a_document(make_config, corpus, bos_tokenizer):
    module = build(make_config, bos_tokenizer, corpus)
    rows = iter(module.train_rows)
    skipped = 0
    lengths = set()
    for text in DOCUMENTS:
        rest = plain(bos_tokenizer, text)
        windows = 0
        while 1 + len(rest) >= 8 + 4:  # BOS is part of the prompt
            row = next(rows)
            assert row.prompt_length in (8, 72, 80)
            assert row.tokens.tolist() == [0, *rest[: row.prompt_length + 4 - 1]]
            lengths.add(row.prompt_length)
            rest = rest[row.prompt_length + 4 - 1 :]
            windows += 1
        skipped += windows == 0
    assert next(rows, None) is None
    assert lengths == {8, 72, 80}
    sizes, counts = [len(plain(bos_tokenizer, text)) for text in DOCUMENTS], module.splits.counts.train
    assert skipped == counts.skipped == module.splits.counts.validation.skipped == 1
    assert (counts.read, counts.tokens, counts.longest) == (len(sizes), sum(sizes), max(sizes))
    used = sum(len(row.tokens) - 1 for row in module.train_rows)
    assert used == counts.tokens - counts.skipped_tokens - counts.lost_tokens and counts.lost_tokens
    lines = "\n".join(itertools.chain(*module.splits.report()))
    share = 100 * counts.lost_tokens / counts.cut_tokens
    names(lines, f"training: {len(module.train_rows)} rows of 8 documents", "left out: 1 of 8 training documents")
    names(lines, f"{counts.cut} of 8 training documents lost {share:.0f} % of their tokens", "data.prompt_min=8")
    assert "validation documents lost" not in lines  # which take one window of each
    for batch in module.train_dataloader():
        for labels, ids, prompt in zip(batch["labels"], batch["input_ids"], batch["prompt_length"], strict=True):
            assert (labels != -100).nonzero().flatten().tolist() == list(range(prompt, prompt + 4))
            assert labels[prompt : prompt + 4].tolist() == ids[prompt : prompt + 4].tolist()


def test_validation_takes_one_window_with_the_longest_prompt_that_fits(make_config, corpus, tokenizer):
    module = build(make_config, tokenizer, corpus)
    expected = []
    for text in DOCUMENTS:
        tokens = plain(tokenizer, text)
        fitting = [length for length in (8, 72, 80) if length + 4 <= len(tokens)]
        if fitting:
            expected.append((tokens[: fitting[-1] + 4], fitting[-1]))
    assert [(row.tokens.tolist(), row.prompt_length) for [row] in module.val_rows] == expected
    assert {length for _, length in expected} >= {8, 80}


def test_the_seed_draws_lengths_of_prompts(make_config, corpus, tokenizer):
    made = [build(make_config, tokenizer, corpus, seed=seed).train_rows for seed in (0, 1)]
    assert [row.prompt_length for row in made[0]] != [row.prompt_length for row in made[1]]


def test_without_validation_split_the_first_documents_are_held_out(make_config, tmp_path, write, tokenizer):
    write(tmp_path, "train", [{"text": text} for text in DOCUMENTS])
    with refuses(DataError, "validation", "data.val_samples=N"):
        build(make_config, tokenizer, str(tmp_path))
    module = build(make_config, tokenizer, str(tmp_path), val_samples=3, packing="packed")
    tokens = [tokenizer.decode(row.tokens) for row in module.train_rows]
    assert tokens[0].startswith(DOCUMENTS[3])
    assert tokenizer.decode(module.val_rows[0][0].tokens).startswith(DOCUMENTS[0])


def test_documents_of_packed_rows_are_told_apart(make_config, corpus, bos_tokenizer):
    options = {"packing": "packed", "train_samples": 5, "batch_size": 5}
    module = build(make_config, bos_tokenizer, corpus, cross_documents=False, **options)
    [batch] = module.train_dataloader()
    end = bos_tokenizer.eos_token_id
    [plain_batch] = build(make_config, bos_tokenizer, corpus, **options).train_dataloader()
    assert batch.pop("document_start").tolist() == [
        list(itertools.accumulate(range(len(ids)), lambda at, i, ids=ids: i if ids[i - 1] == end else at))
        for ids in batch["input_ids"].tolist()
    ]
    borders = batch["input_ids"][:, :-1] == end
    assert borders.any() and (batch["input_ids"][:, 1:][borders] == bos_tokenizer.bos_token_id).all()
    labels = plain_batch.pop("labels")
    labels[:, 1:][borders] = -100
    assert torch.equal(batch.pop("labels"), labels)
    assert all(torch.equal(batch[name], plain_batch[name]) for name in batch | plain_batch)


def test_padding_begins_no_document(make_config, corpus, tokenizer):
    module = build(make_config, tokenizer, corpus, packing="packed", cross_documents=False, val_batch_size=50)
    [batch] = module.val_dataloader()  # no padding token: EOS pads
    starts, real = batch["document_start"][-1], batch["attention_mask"][-1]
    assert not real.all() and (starts[~real] == starts[real][-1]).all()


def test_packing_needs_an_end_of_its_own(make_config, corpus, bos_tokenizer):
    tok = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.WordLevel({"x": 0}, "x")), pad_token="x")
    with refuses(DataError, "data.packing=packed", "end-of-sequence"):
        build(make_config, tok, corpus, packing="packed")
    tok = copy.deepcopy(bos_tokenizer)
    tok.eos_token = tok.bos_token
    with refuses(DataError, "data.cross_documents=true"):
        build(make_config, tok, corpus, packing="packed", cross_documents=False)
    assert build(make_config, tok, corpus, packing="packed").train_rows


REPEATED = {"packing": "repeated", "max_length": 170}


def test_passages_are_repeated_word_for_word(make_config, corpus, bos_tokenizer):
    context = 165
    module = build(make_config, bos_tokenizer, corpus, context, **REPEATED)
    again = plain(bos_tokenizer, REPEAT_PROMPT)
    size = (min(170, context) - 1 - len(again)) // 2  # BOS comes once
    expected, first = [], []
    for text in DOCUMENTS:
        tokens = plain(bos_tokenizer, text)
        passages = [tokens[at : at + size] for at in range(0, len(tokens), size)]
        whole = [[0, *passage, *again, *passage] for passage in passages if len(passage) == size]
        expected, first = expected + whole, first + whole[:1]
    assert [row.tokens.tolist() for row in module.train_rows] == expected and len(expected) > len(first) > 1
    assert [row.tokens.tolist() for [row] in module.val_rows] == first
    assert {row.prompt_length for row in module.train_rows} == {1 + size}
    counts = module.splits.counts.train
    assert counts.skipped == len(DOCUMENTS) - len(first) == module.splits.counts.validation.skipped > 0
    assert counts.tokens - counts.skipped_tokens - counts.lost_tokens == size * len(expected)
    for batches in (module.train_dataloader(), module.val_dataloader()):
        for batch in batches:
            assert torch.equal(batch["labels"], batch["input_ids"]) and batch["attention_mask"].all()
            assert set(batch["prompt_length"].tolist()) == {1 + size}


@pytest.mark.parametrize(("context", "copy", "before"), [(160, 30, 8), (10_000, 5, 5)])
def test_chunks_of_passages_are_repeated(make_config, corpus, bos_tokenizer, context, copy, before):
    """A chunk comes behind 8 tokens of the one before, or all of it; all come, and the batch says which it was."""
    settings = REPEATED | {"copy_max": copy}
    module = build(make_config, bos_tokenizer, corpus, context, **settings)
    again = plain(bos_tokenizer, REPEAT_PROMPT)
    size = min(170, context) - 1 - len(again) - 8 - copy
    passages = [
        (text, tokens[at : at + size])
        for text in DOCUMENTS
        for tokens in [plain(bos_tokenizer, text)]
        for at in range(0, len(tokens) - size + 1, size)
    ]
    chunks = set()
    for row, (_, passage) in zip(module.train_rows, passages, strict=True):
        first, end = (column - 1 for column in row.copied)  # BOS comes once
        lead = passage[first - before : first] if first else []
        assert row.tokens.tolist() == [0, *passage, *again, *lead, *passage[first:end]]
        assert row.prompt_length == 1 + size and first % copy == 0 and end == min(first + copy, size)
        chunks.add(first)
    assert chunks <= set(range(0, size, copy)) and (copy < 30 or chunks == set(range(0, size, 30)))
    assert len(module.val_rows) == len({text for text, _ in passages})
    for batch in module.train_dataloader():
        assert torch.equal(batch["labels"] != -100, batch["attention_mask"])
        for ids, (first, end) in zip(batch["input_ids"].tolist(), batch["copied"].tolist(), strict=True):
            row = next(row for row in module.train_rows if ids[: len(row.tokens)] == row.tokens.tolist())
            assert row.copied == (first, end)


def test_where_passages_are_repeated_as_a_whole(make_config, corpus, tokenizer):
    """Where a chunk holds the passage; a row that leaves too little for one is refused."""
    whole, module = (build(make_config, tokenizer, corpus, **REPEATED, copy_max=most) for most in (0, 100))
    assert [row.tokens.tolist() for row in module.train_rows] == [row.tokens.tolist() for row in whole.train_rows]
    assert all(row.copied is None for row in module.train_rows)
    again = len(plain(tokenizer, REPEAT_PROMPT))
    with refuses(DataError, "data.packing=repeated", "63", "64", f"data.max_length of {128 + again}"):
        build(make_config, tokenizer, corpus, packing="repeated", max_length=127 + again)
    assert build(make_config, tokenizer, corpus, packing="repeated", max_length=128 + again).train_rows


def test_a_plain_text_is_one_document(make_config, tokenizer, tmp_path, write):
    """As shards, or as a folder of texts with any names; lines do not part it."""
    text, rows = DOCUMENTS[2].replace(" ", "\n"), []
    write(tmp_path / "json", "train", [{"text": text}] * 2)
    for name, files in {"json": (), "shards": ("train-1.txt", "train-2.txt"), "texts": ("a.txt", "b.txt")}.items():
        write(tmp_path / name, "validation", [{"text": text}])
        for file in files:
            (tmp_path / name / file).write_text(text)
        module = build(
            make_config, tokenizer, str(tmp_path / name), name="facts"
        )  # data.root alone says where they are
        rows.append([row.tokens.tolist() for row in module.train_rows])
    assert rows[0] == rows[1] == rows[2] != []


def test_why_a_split_has_no_rows(make_config, tokenizer, tmp_path, write):
    write(tmp_path / "corpus", "train", [{"text": DOCUMENTS[0]}, {"text": DOCUMENTS[5]}])
    with refuses(DataError, "training split", str(tmp_path), "held out", "data.val_samples=2"):
        build(make_config, tokenizer, str(tmp_path), val_samples=2, prompt_min=1, prompt_max=8)
    write(tmp_path / "corpus", "validation", [{"text": DOCUMENTS[2]}])
    with refuses(DataError, "training split", "2 were left out", "too short", "data.prompt_min=80"):
        build(make_config, tokenizer, str(tmp_path), prompt_min=80)


LONG = [document(i, words) for i, words in enumerate([5, 1500, 700, 260, 1200])]


@pytest.fixture
def books(tmp_path, write):
    for split in ("train", "validation"):
        write(tmp_path / "corpus", split, [{"text": text} for text in LONG])
    return str(tmp_path)


def contexts(make_config, tokenizer, root, **more):
    return build(
        make_config, tokenizer, root, **{"packing": "responses", "contexts": [512, 320], "max_length": 1200, **more}
    )


ASKED = ["again", "next", "question", "question"]
CHAT = "{% for one in messages %}[{{ one.role }}] {{ one.content }} {% endfor %}[assistant] "


@pytest.mark.parametrize(("kinds", "chat"), [(["again", "next"], None), (ASKED, None), (ASKED, CHAT)])
def test_responses_continue_or_repeat_their_context_or_answer_a_question_about_it(
    make_config, books, tokenizer, monkeypatch, kinds, chat
):
    monkeypatch.setattr(tokenizer, "chat_template", chat)
    module = contexts(make_config, tokenizer, books, responses=kinds)
    before = tuple(f"[system] {role}" if chat else role for role in ROLES)
    rows, again = [*module.train_rows], plain(tokenizer, REPEAT_PROMPT)
    assert rows and len(rows) % len(kinds) == 0 and {row.context_length for row in rows} == {512, 320}
    cuts = [followed.prompt_length / followed.context_length for followed in rows[1 :: len(kinds)]]
    assert min(cuts) < 0.6 and max(cuts) > 0.8
    whole, systems, places = [plain(tokenizer, text) for text in LONG], set(), set()
    for at in range(0, len(rows), len(kinds)):
        repeated, followed, *asked = rows[at : at + len(kinds)]
        start, tokens = repeated.prompt_length, followed.tokens.tolist()
        text = tokens[start - 1 :] if asked else tokens  # facts and rules stand in a context, not at its end
        assert any(text == ids[i : i + len(text)] for ids in whole for i in range(len(ids)))
        cut = followed.prompt_length
        assert 192 <= cut <= start and len(tokens) == start + 96
        assert followed.loss.nonzero()[0].tolist() == list(range(cut, cut + 96))
        behind, context = repeated.tokens[start:].tolist(), repeated.tokens[:start].tolist()
        assert context == tokens[:start] and behind[: len(again)] == again
        chunk = behind[len(again) :]
        assert any(chunk == context[i : i + 8 + 96] for i in range(start))
        assert repeated.loss.nonzero()[0].tolist() == list(range(len(repeated.tokens) - 96, len(repeated.tokens)))
        questions, told = set(), tokenizer.decode(context)
        for row in asked:
            assert row.tokens[:start].tolist() == context
            answer = tokenizer.decode(row.tokens[row.loss])
            question = tokenizer.decode(row.tokens[start:][~row.loss[start:]])
            if told.startswith(before):
                questions.add((question, answer))  # some rules say how an answer begins
                assert (" [assistant] " in question) == (chat is not None)
                found = [(rule, what) for rule in RULES if question.endswith(rule.lead) for what in rule.demands]
                [text] = [
                    rule.text.format(what=what) for rule, what in found if rule.followed.format(what=what) == answer
                ]
                places.add(told.partition(text)[0].count("\n") if text in told else 0)
            else:
                questions.add(question)
                assert answer in told and "?\n" in question
        assert len(questions) == len(asked)
        systems.add(told.startswith(before))
    assert systems == ({False, True} if "question" in kinds else {False})
    assert 0 not in places and (not places or max(places) > 2)  # of rules in their list, from 1


def test_validation_takes_the_longest_context_of_each_document(make_config, books, tokenizer):
    module = contexts(make_config, tokenizer, books, responses=["next"])
    lengths = [len(plain(tokenizer, text)) for text in LONG]
    expected = [512 if n >= 512 + 96 else 320 for n in lengths if n >= 320 + 96]
    assert [row.context_length for [row] in module.val_rows] == expected
    assert module.splits.counts.validation.skipped == len(LONG) - len(expected)


@pytest.mark.parametrize(
    ("setting", "named"),
    [
        ({"responses": ["next", "lyrics"]}, ["data.responses", "lyrics", "again"]),
        ({"contexts": []}, ["data.contexts", "192"]),
        ({"contexts": [4096]}, ["data.contexts", "4096", "data.max_length=1200"]),
    ],
)
def test_responses_that_cannot_be_made_are_refused(make_config, books, tokenizer, setting, named):
    with refuses(DataError, *named):
        contexts(make_config, tokenizer, books, **setting)


@pytest.mark.parametrize(("name", "most", "named"), [("NUM_FACTS", 20, "20 facts"), ("NUM_RULES", (9, 9), "a system")])
def test_a_context_without_room_for_what_is_asked_is_refused(
    make_config, books, tokenizer, monkeypatch, name, most, named
):
    monkeypatch.setattr(f"ag.data.responses.{name}", most)
    with refuses(DataError, "data.contexts", "192", named, "question", "data.responses"):
        contexts(make_config, tokenizer, books, contexts=[192], responses=["question"])
