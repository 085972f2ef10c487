"""Replicas of the server on a Ray cluster of this machine, behind one address."""

import asyncio
import json
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace

import httpx
import psutil
import pytest
import torch

openai = pytest.importorskip("openai", reason="needs the server's libraries: pip install 'ag[serve]'")
pytest.importorskip("ray.serve", reason="needs Ray Serve: pip install 'ag[cluster]'")
from ray.exceptions import ActorUnavailableError  # noqa: E402

import ag  # noqa: E402
from ag.commands.serve import ServeConfig  # noqa: E402
from ag.config.keys import ConfigError  # noqa: E402
from ag.config.recipes import resolve  # noqa: E402
from ag.errors import UserError  # noqa: E402
from ag.serve import cluster  # noqa: E402
from ag.serve.snapshot import Counts, Running, Snapshot, together  # noqa: E402
from ag.serve.worker import StoppedError  # noqa: E402
from tests.support import ROOT, ray_worker, replicas  # noqa: E402
from tests.support.http_server import VOCABULARY, byte_tokenizer, saved, server  # noqa: E402
from tests.support.refused import refuses  # noqa: E402
from tests.support.warm import started  # noqa: E402

TOKENIZER = byte_tokenizer()
KEY = "a key of a test"
LONG = 3000  # tokens of an answer that takes seconds
KEYS = ("policy=h2o", "share=0.5", "memory=32MiB", f"answer_tokens={LONG}", "served_name=tiny", "batch=16", "queue=16")


@pytest.fixture(scope="module")
def tiny(tiny_llama):
    return tiny_llama(vocab_size=VOCABULARY, max_position_embeddings=8192)


@pytest.fixture(scope="module")
def served(tiny, tmp_path_factory):
    folder = saved(tiny, tmp_path_factory.mktemp("replicas"))
    told = {ray_worker.PYTHON: started(), "AG_API_KEY": KEY}
    with server(folder, "cluster=local", "replicas=2", *KEYS, script=Path(replicas.__file__), **told) as found:
        yield found


@pytest.fixture(scope="module")
def address(served):
    return served[0]


def post(address, body, kind="completions", **headers):
    told = {"Authorization": f"Bearer {KEY}"} | headers
    return httpx.post(f"{address}/v1/{kind}", json={"model": "tiny", "temperature": 0} | body, headers=told, timeout=90)


def streamed(answer):
    """The events of a stream but its last one, which says that it is done."""
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    return [json.loads(event) for event in events if event != "[DONE]"]


def said(model, prompt, tokens):
    """Text of the greedy answer of ``model.generate``."""
    ids = torch.tensor([TOKENIZER(prompt)["input_ids"]])
    cache = ag.EvictionCache(model, "h2o", 0.5)
    out = model.generate(ids, past_key_values=cache, max_new_tokens=tokens, do_sample=False)
    return TOKENIZER.decode(out[0, ids.shape[1] :].tolist(), skip_special_tokens=True).removesuffix("\ufffd")


def figures(address, name):
    """A figure by replica, all its other labels together."""
    text = httpx.get(f"{address}/metrics", headers={"Authorization": f"Bearer {KEY}"}, timeout=30).text
    found = Counter()
    for line in text.splitlines():
        if line.startswith(f"{name}{{"):
            found[line.partition('replica="')[2].partition('"')[0]] += float(line.rpartition(" ")[2])
    return found


def running_replicas():
    """The processes of the replicas, below this one's warm Python."""
    below = psutil.Process().children(recursive=True)
    return [one for one in below if one.name() == "ray::ServeReplica:ag:model"]


def until(holds, seconds=60):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


# ---- without a cluster


def test_what_the_turns_of_a_conversation_have_in_common():
    """And nobody else; what a client says goes before."""

    def of(**asked):
        return cluster.conversation(json.dumps(asked).encode())

    first = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    later = [*first, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Go on."}]
    assert of(messages=first) == of(messages=later, temperature=0.5) != of(messages=[first[0], later[-1]])
    begun = "x" * cluster.BEGINNING
    assert of(prompt=begun) == of(prompt=begun + "y") != of(prompt="y" + begun)
    assert of(prompt=[1, 2]) == of(prompt=[1, 2]) != of(prompt=[1, 3])
    assert of(messages=first, prompt_cache_key="a") == of(prompt="x", prompt_cache_key="a") != of(messages=first)
    assert "Hello" not in of(messages=first)
    for body in (b"{", b"[]", b"{}", b'{"messages": [1]}', b'{"messages": 1}', b'{"prompt": 1}', b"\xff"):
        assert cluster.conversation(body) == ""


def test_figures_of_replicas_are_told_apart():
    texts = {
        name: f'# TYPE ag_x_total counter\nag_x_total{{a="b"}} {number}\n' for name, number in (("r", 1), ("s", 2))
    }
    lines = cluster.labelled(texts).decode().splitlines()
    assert [line for line in lines if not line.startswith("#")] == [
        'ag_x_total{a="b",replica="r"} 1.0',
        'ag_x_total{a="b",replica="s"} 2.0',
    ]
    assert [line for line in lines if line.startswith("# TYPE")] == ["# TYPE ag_x_total counter"]


def test_replicas_together():
    one = Snapshot(1, 0, (Running(0, 5, 2, 0.5, (1.0,)),), 10, 4, 64, 1, 2, Counts(prompts=5, ended=Counter(stop=2)))
    two = Snapshot(2, 1, (), 10, 10, 64, 0, 0, Counts(prompts=7, ended=Counter(stop=1, length=1)))
    sums = Counts(prompts=12, ended=Counter(stop=3, length=1))
    assert together([one, two]) == Snapshot(3, 1, one.running, 20, 14, 64, 1, 2, sums)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"replicas": "2"}, ["replicas=[2]", "cluster=local"]),
        ({"cores": "2"}, ["cores=2", "cluster=local"]),
        ({"cluster": "local", "replicas": "0"}, ["replicas=[0]", "at least 1"]),
        ({"cluster": "local", "replicas": "[3,2]"}, ["replicas=[3, 2]", "[least,most]"]),
        ({"cluster": "local", "gates": "somewhere"}, ["served_name="]),
    ],
)
def test_what_is_refused(keys, words):
    with refuses(ConfigError, *words):
        resolve(ServeConfig, {"model": "smollm2"} | keys if "gates" not in keys else keys)


def test_a_cluster_without_room(monkeypatch):
    monkeypatch.setattr(cluster, "connected", lambda address: nullcontext())
    monkeypatch.setattr(cluster, "resources", lambda: {"CPU": 4.0})
    config = resolve(ServeConfig, {"model": "smollm2", "cluster": "local", "replicas": "2", "cores": "4096"})
    with refuses(UserError, "replicas=2", "CPU 4", "cpus=4096"):
        cluster.run_on("local", config, None)


def test_the_file_for_serve_deploy():
    """It is what Ray reads, and its keys are those of the command."""
    import yaml
    from ray.serve.schema import ServeDeploySchema

    told = ServeDeploySchema.model_validate(yaml.safe_load((ROOT / "scripts/serve.yaml").read_text()))
    (application,) = told.applications
    assert (told.http_options.host, application.import_path) == ("127.0.0.1", "ag.serve.cluster:app")
    model = cluster.app(application.args)._bound_deployment.init_args[0]._bound_deployment
    assert (model.name, model.func_or_class) == ("model", cluster.Replica)
    scaling = model._deployment_config.autoscaling_config
    assert [scaling.min_replicas, scaling.max_replicas] == application.args["replicas"]
    with refuses(ConfigError, "shear", "share"):
        cluster.app({**application.args, "shear": 0.3})


def test_a_replica_whose_scheduler_has_failed_is_not_healthy(tiny, tmp_path):
    config = resolve(ServeConfig, {"model": str(saved(tiny, tmp_path)), "cluster": "local"})

    async def work():
        replica = cluster.Replica(config, {})
        replica.check_health()
        replica._service.worker.scheduler.step = None  # so that the thread ends by an error
        body = json.dumps({"model": config.name, "prompt": "x"}).encode()
        taken, begun, *_ = [message async for message in replica.ask("/v1/completions", body)]
        assert (taken, begun["status"]) == (None, 503)
        with refuses(StoppedError, "failed"):
            replica.check_health()

    threads = torch.get_num_threads()
    try:
        asyncio.run(work())
    finally:
        torch.set_num_threads(threads)


class Losing:
    """Stands for the replicas of a front: so many questions are lost, the next one is answered."""

    def __init__(self, losses):
        self.losses, self.asked, self.ask = losses, [], self

    def options(self, **told):
        return self

    def remote(self, path, body, full):
        self.asked.append(time.monotonic())
        return Answer(lost=len(self.asked) <= self.losses)


class Answer:
    """What a replica says, until it is lost."""

    def __init__(self, lost, status=200):
        begin = {"type": "http.response.start", "status": status, "headers": []}
        self._said = iter([None, ActorUnavailableError("gone", None) if lost else begin])

    async def __anext__(self):
        said = next(self._said)
        if isinstance(said, Exception):
            raise said
        return said

    def cancel(self):
        pass


@pytest.mark.parametrize("losses", [1, cluster.TRIES - 1, cluster.TRIES])
def test_what_a_lost_replica_was_asked_is_asked_again(losses, monkeypatch):
    """After a while: a router may not have heard of the loss yet."""
    monkeypatch.setattr(cluster, "LOST_SECONDS", 0.05)
    config = resolve(ServeConfig, {"model": "smollm2", "cluster": "local"})
    replicas = Losing(losses)
    front = cluster.Front(replicas, config, "h2o", None)
    transport = httpx.ASGITransport(front.app())

    async def work():
        async with httpx.AsyncClient(transport=transport, base_url="http://front") as client:
            return await asyncio.wait_for(client.post("/v1/completions", json={"prompt": "x"}), 30)

    if losses < cluster.TRIES:
        begin = asyncio.run(front._asked("/v1/completions", b"{}"))
        assert isinstance(begin, cluster.Passed) and len(replicas.asked) == losses + 1
    else:
        refused = asyncio.run(work())
        assert (refused.status_code, len(replicas.asked)) == (503, losses)
        assert asyncio.run(front.drain()) == 0  # nothing is open
    waits = [after - before for before, after in zip(replicas.asked, replicas.asked[1:], strict=False)]
    assert all(wait >= 0.05 * 2**number for number, wait in enumerate(waits))


@pytest.mark.parametrize(("full", "places"), [(0, ["a", "b", "c"]), (1, ["b", "c"]), (2, ["c"]), (3, ["a", "b", "c"])])
def test_replicas_without_room_are_passed_over(full, places, monkeypatch):
    """In the order of the ring, which counts each once."""

    async def ranked(*_):
        return [["a"], ["b"], ["c"]]

    monkeypatch.setattr(cluster.ConsistentHashRouter, "choose_replicas", ranked)
    ring, asked = object.__new__(cluster.Ring), SimpleNamespace(kwargs={"full": full})
    assert asyncio.run(ring.choose_replicas([], asked)) == [[place] for place in places]


@pytest.mark.parametrize("without_room", [0, 1, cluster.TRIES - 1, cluster.TRIES])
def test_a_request_is_asked_of_another_replica_where_the_queue_is_full(without_room):
    """The client hears 429 from the last one."""
    asked = []

    class Full(Losing):
        def remote(self, path, body, full):
            asked.append(full)
            return Answer(lost=False, status=429 if len(asked) <= without_room else 200)

    config = resolve(ServeConfig, {"model": "smollm2", "cluster": "local"})
    front = cluster.Front(Full(0), config, "h2o", None)
    begin = asyncio.run(front._asked("/v1/completions", b"{}"))._begin
    assert begin["status"] == (200 if without_room < cluster.TRIES else 429)
    assert asked == [*range(min(without_room + 1, cluster.TRIES))]


# ---- on a cluster


@pytest.mark.slow
def test_two_replicas_answer_as_the_model_alone(tiny, address):
    """Whole answers and streams; both take part."""
    prompts = [f"{number} is the number of this prompt" for number in range(24)]
    before = figures(address, "ag_answers_ended_total")
    with ThreadPoolExecutor(8) as pool:
        whole = [*pool.map(lambda prompt: post(address, {"prompt": prompt, "max_tokens": 9}), prompts)]
        streams = [
            *pool.map(lambda prompt: post(address, {"prompt": prompt, "max_tokens": 9, "stream": True}), prompts[:6])
        ]
    want = [said(tiny, prompt, 9) for prompt in prompts]
    assert [answer.json()["choices"][0]["text"] for answer in whole] == want
    pieces = ["".join(event["choices"][0]["text"] for event in streamed(answer)) for answer in streams]
    assert pieces == want[:6]
    ended = figures(address, "ag_answers_ended_total") - before
    assert len(ended) == 2 and ended.total() == 30


@pytest.mark.slow
def test_the_turns_of_a_conversation_go_to_one_replica(address):
    """Which goes on from what it has read: the third turn, as the second has left the beginning."""
    for number in range(4):
        ended, reused = (figures(address, name) for name in ("ag_answers_ended_total", "ag_prompt_tokens_reused_total"))
        messages = [{"role": "user", "content": f"{number}: {'a long question, ' * 9}"}]
        for _ in range(3):
            told = post(address, {"messages": messages, "max_tokens": 8}, "chat/completions").json()
            messages += [told["choices"][0]["message"] | {"refusal": None}, {"role": "user", "content": "Go on."}]
        ended = figures(address, "ag_answers_ended_total") - ended
        reused = figures(address, "ag_prompt_tokens_reused_total") - reused
        assert [*ended.values()] == [3.0] and reused.keys() == ended.keys() and reused.total() > 64


@pytest.mark.slow
def test_what_the_front_refuses_and_what_replicas_refuse(address):
    right = {"prompt": "x", "max_tokens": 2}
    assert post(address, right, Authorization="Bearer another").json()["error"]["code"] == "invalid_api_key"
    assert httpx.get(f"{address}/metrics").status_code == 401
    assert post(address, {"prompt": "x" * 2**21}).status_code == 413
    wrong = post(address, right | {"max_tokens": LONG + 1})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "max_tokens")
    assert post(address, right | {"model": "other"}).json()["error"]["code"] == "model_not_found"
    assert post(address, {"max_tokens": 2}).json()["error"]["param"] == "prompt"
    live = httpx.get(f"{address}/live", headers={"Authorization": f"Bearer {KEY}"}).json()
    assert (live["model"], live["policy"], live["status"]) == ("tiny", "h2o 0.5", "ok")


@pytest.mark.slow
def test_a_client_that_leaves_ends_its_answer(address):
    def cancelled():
        text = httpx.get(f"{address}/metrics", headers={"Authorization": f"Bearer {KEY}"}).text
        lines = [line for line in text.splitlines() if line.startswith('ag_answers_ended_total{reason="cancelled"')]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    before = cancelled()
    asked = {"model": "tiny", "prompt": "x", "max_tokens": LONG, "logit_bias": {"2": -100}}
    told = {"Authorization": f"Bearer {KEY}"}
    with httpx.stream("POST", f"{address}/v1/completions", json=asked | {"stream": True}, headers=told) as answer:
        next(answer.iter_lines())
    with suppress(httpx.ReadTimeout):
        httpx.post(f"{address}/v1/completions", json=asked, headers=told, timeout=0.3)
        raise AssertionError("it was answered")
    until(lambda: cancelled() == before + 2)
    until(lambda: figures(address, "ag_answers").total() == 0)


@pytest.mark.slow
def test_queues_that_are_full(address):
    """Clients hear it; health and figures are told meanwhile."""
    asked = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "x"}],
        "max_tokens": LONG,
        "logit_bias": {"2": -100},
        "stream": True,
    }
    told = {"Authorization": f"Bearer {KEY}"}
    with ExitStack() as stack:
        client = stack.enter_context(httpx.Client(limits=httpx.Limits(max_connections=None), timeout=60))
        accepted, end = 0, time.monotonic() + 60
        while accepted <= 2 * (16 + 16):  # one more than there is room for
            answer = stack.enter_context(
                client.stream("POST", f"{address}/v1/chat/completions", json=asked, headers=told)
            )
            if answer.status_code == 200:
                accepted += 1
            elif accepted >= 32:
                break
            else:  # what waits has not been taken in yet
                assert time.monotonic() < end
                time.sleep(0.05)
        answer.read()
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert int(answer.headers["Retry-After"]) > 0
        assert client.get(f"{address}/health").status_code == 200
        answers = figures(address, "ag_answers")
        assert 32 <= answers.total() <= 64 and len(+answers) == 2  # one conversation, but either has room
    until(lambda: figures(address, "ag_answers").total() == 0)


@pytest.mark.slow
def test_a_replica_that_is_killed(tiny, served):
    """Whole answers are another's, streams end by an error; another replica takes its place."""
    address, process = served
    asked = {"max_tokens": 400, "logit_bias": {"2": -100}}
    prompts = [f"{number} will be asked for" for number in range(10)]  # which one replica has room for twice
    with ThreadPoolExecutor(20) as pool:
        whole = [pool.submit(post, address, asked | {"prompt": prompt}) for prompt in prompts]
        streams = [pool.submit(post, address, asked | {"prompt": prompt, "stream": True}) for prompt in prompts]
        until(lambda: min(figures(address, "ag_steps_total").values()) > 0 and len(figures(address, "ag_answers")) == 2)
        until(lambda: all(number > 2 for number in figures(address, "ag_answers").values()))
        running = running_replicas()
        assert len(running) == 2
        running[0].kill()
        whole, streams = ([answer.result() for answer in answers] for answers in (whole, streams))
    texts = [answer.json()["choices"][0]["text"] for answer in whole]
    ends = [streamed(answer)[-1] for answer in streams]
    broken = [end for end in ends if "error" in end]
    assert broken and all(end["error"]["type"] == "server_error" for end in broken)
    assert all("error" in end or end["choices"][0]["finish_reason"] == "length" for end in ends)
    again = [post(address, asked | {"prompt": prompt}).json()["choices"][0]["text"] for prompt in prompts]
    assert texts == again
    until(lambda: len(figures(address, "ag_answers")) == 2)


@pytest.mark.slow
def test_sigterm_lets_answers_end_and_takes_no_more(served):
    """The last test: it ends the server."""
    address, process = served
    until(lambda: len(running_replicas()) == 2)  # whatever the tests before have done
    told, running = {"Authorization": f"Bearer {KEY}"}, running_replicas()
    asked = {"model": "tiny", "prompt": "x", "max_tokens": 1500, "stream": True, "logit_bias": {"2": -100}}
    asking = httpx.stream("POST", f"{address}/v1/completions", json=asked, headers=told, timeout=60)
    with httpx.Client() as watcher, asking as answer:  # the first made before, which takes a while
        lines = answer.iter_lines()
        next(lines)
        process.send_signal(signal.SIGTERM)
        until(lambda: watcher.get(f"{address}/health").status_code == 503)
        refused = post(address, {"prompt": "x"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        rest = [line for line in lines if line]
    assert rest[-1] == "data: [DONE]" and json.loads(rest[-2][6:])["choices"][0]["finish_reason"] == "length"
    assert process.wait(60) == 0
    until(lambda: not any(one.is_running() for one in running))
