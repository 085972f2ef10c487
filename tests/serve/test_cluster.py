"""Replicas of the server on a Ray cluster of this machine, behind one address."""

import asyncio
import json
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import httpx
import psutil
import pytest
import torch

openai = pytest.importorskip("openai", reason="needs the server's libraries: pip install 'ag[serve]'")
pytest.importorskip("ray.serve", reason="needs Ray Serve: pip install 'ag[cluster]'")
from prometheus_client.core import GaugeMetricFamily, Metric  # noqa: E402
from ray.exceptions import ActorUnavailableError  # noqa: E402
from starlette.testclient import TestClient  # noqa: E402

import ag  # noqa: E402
from ag.commands.serve import ServeConfig  # noqa: E402
from ag.config.keys import ConfigError  # noqa: E402
from ag.config.recipes import resolve  # noqa: E402
from ag.errors import UserError  # noqa: E402
from ag.serve import Request, cluster  # noqa: E402
from ag.serve.metrics import label_replicas, prometheus_text  # noqa: E402
from ag.serve.scheduler import StoppedError  # noqa: E402
from ag.serve.snapshot import Counts, Running, Snapshot, sum_snapshots  # noqa: E402
from tests.support import ROOT, ray_worker, replicas  # noqa: E402
from tests.support.http_server import byte_tokenizer, said, saved, server  # noqa: E402
from tests.support.refused import refuses  # noqa: E402
from tests.support.served import alone  # noqa: E402
from tests.support.warm import started  # noqa: E402

KEY = "a key of a test"
HEADERS = {"Authorization": f"Bearer {KEY}"}
LONG = 3000  # tokens of an answer that takes seconds
KEYS = ("policy=h2o", "share=0.5", "memory=32MiB", f"answer_tokens={LONG}", "served_name=tiny", "batch=16", "queue=16")
NEVER = {"logit_bias": {"2": -100}}  # no end before the last token


# ---- without a cluster


def test_the_hash_of_a_conversation():
    """It is the same for all its turns; ``prompt_cache_key`` replaces the texts."""

    def of(**asked):
        return cluster.session_id(json.dumps(asked).encode())

    first = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hello"}]
    later = [*first, {"role": "assistant", "content": "Yes?"}, {"role": "user", "content": "Go on."}]
    assert of(messages=first) == of(messages=later, temperature=0.5) != of(messages=[first[0], later[-1]])
    assert of(input="Hello") == of(input=first[1:]) == of(input=later[1:]) != of(input="Go on.")
    assert (
        of(input="Hello", instructions="Be kind.") == of(input=later[1:], instructions="Be kind.") != of(input="Hello")
    )
    begun = "x" * cluster.SESSION_LENGTH
    assert of(prompt=begun) == of(prompt=begun + "y") != of(prompt="y" + begun)
    assert of(prompt=[1, 2]) == of(prompt=[1, 2]) != of(prompt=[1, 3])
    assert of(messages=first, prompt_cache_key="a") == of(prompt="x", prompt_cache_key="a") != of(messages=first)
    assert "Hello" not in of(messages=first)
    for body in (b"{", b"[]", b"{}", b'{"messages": [1]}', b'{"input": 1}', b'{"prompt": 1}', b"\xff"):
        assert cluster.session_id(body) == ""


def test_figures_of_replicas_together():
    def figures(number):
        return [Metric("ag_x", "", "counter"), GaugeMetricFamily("ag_y", "", value=number)]

    lines = prometheus_text(label_replicas({"r": figures(1), "s": figures(2)})).decode().splitlines()
    assert [x for x in lines if x.startswith("ag_y")] == ['ag_y{replica="r"} 1.0', 'ag_y{replica="s"} 2.0']
    assert [x for x in lines if x.startswith("# TYPE")] == ["# TYPE ag_x_total counter", "# TYPE ag_y gauge"]
    one = Snapshot(
        1, 0, (Running(0, 5, 2, 0.5, (1.0,)),), 10, 4, 64, 1, 2, Counts(prompts=5, num_ended=Counter(stop=2))
    )
    two = Snapshot(2, 1, (), 10, 10, 64, 0, 0, Counts(prompts=7, num_ended=Counter(stop=1, length=1)))
    sums = Counts(prompts=12, num_ended=Counter(stop=3, length=1))
    assert sum_snapshots([one, two]) == Snapshot(3, 1, one.running, 20, 14, 64, 1, 2, sums)


@pytest.mark.parametrize(
    ("keys", "words"),
    [
        ({"model": "smollm2", "cores": "2"}, ["cores=2", "cluster=local"]),
        ({"model": "smollm2", "cluster": "local", "replicas": "[3,2]"}, ["replicas=[3, 2]", "[least,most]"]),
        ({"cluster": "local", "gates": "somewhere"}, ["served_name="]),
    ],
)
def test_refused_keys(keys, words):
    with refuses(ConfigError, *words):
        resolve(ServeConfig, keys)


def test_a_cluster_without_room(monkeypatch):
    monkeypatch.setattr(cluster, "connected", lambda address: nullcontext())
    nodes = [{"Resources": {"CPU": cores}, "Alive": alive} for cores, alive in ((5.0, True), (3.0, True), (9.0, False))]
    monkeypatch.setattr("ray.nodes", lambda: nodes)
    monkeypatch.setattr("ray.serve.start", lambda **_: pytest.fail("started"))
    config = resolve(ServeConfig, {"model": "smollm2", "cluster": "local", "replicas": "2", "cores": "4"})
    with refuses(UserError, "replicas=2", "CPU 8", "2 machines", "cpus=4"):
        cluster.run_on("local", config)


def test_the_file_for_serve_deploy():
    """Ray can read it, and its keys are those of the command."""
    import yaml
    from ray.serve.schema import ServeDeploySchema

    file = ServeDeploySchema.model_validate(yaml.safe_load((ROOT / "scripts/serve.yaml").read_text()))
    (application,) = file.applications
    assert (file.http_options.host, application.import_path) == ("127.0.0.1", "ag.serve.cluster:app")
    model = cluster.app(application.args)._bound_deployment.init_args[0]._bound_deployment
    assert (model.name, model.func_or_class) == ("model", cluster.Replica)
    scaling = model._deployment_config.autoscaling_config
    assert [scaling.min_replicas, scaling.max_replicas] == application.args["replicas"]
    with refuses(ConfigError, "shear", "share"):
        cluster.app({**application.args, "shear": 0.3})


def test_a_replica_with_a_failed_scheduler_is_not_healthy(tiny, tmp_path):
    config = resolve(ServeConfig, {"model": str(saved(tiny, tmp_path)), "cluster": "local"})

    async def work():
        replica = cluster.Replica(config, {})
        replica.check_health()
        replica._service.scheduler.step = None  # so that the thread raises
        body = json.dumps({"model": config.name, "prompt": "x"}).encode()
        received, begin, *_ = [message async for message in replica.ask("/v1/completions", body, "mine")]
        assert (received, begin["status"]) == (None, 503)
        with refuses(StoppedError, "failed"):
            replica.check_health()

    threads = torch.get_num_threads()
    try:
        asyncio.run(work())
    finally:
        torch.set_num_threads(threads)


class Replicas:
    """Stands for the replicas of a front; each request gets the next of ``begins``.

    Those are the status of an answer, None for a replica that dies before it answers, or "late" for one that dies in
    the middle of a stream.
    """

    def __init__(self, *begins):
        self._begins, self.times, self.ask = iter(begins), [], self

    def options(self, **options):
        return self

    def remote(self, path, body, name):
        self.times.append(time.monotonic())
        return Answer(next(self._begins))


class Answer:
    def __init__(self, begin):
        status = 200 if begin == "late" else begin
        lost, start = ActorUnavailableError("gone", None), {"type": "http.response.start", "status": status}
        end = lost if begin == "late" else b"answer"
        self._messages = iter([None, *([lost] if begin is None else [start | {"headers": []}, end])])

    def __aiter__(self):
        return self

    async def __anext__(self):
        message = next(self._messages, StopAsyncIteration())
        if isinstance(message, Exception):
            raise message
        return message

    def cancel(self):
        pass


@pytest.mark.parametrize(
    ("begins", "status", "text"),
    [
        ([None, None, 200], 200, "answer"),
        ([None, None, None], 503, "have ended"),
        ([429], 429, "answer"),
        (["late"], 200, 'data: {"error"'),
    ],
)
def test_what_a_replica_does_not_answer_is_asked_of_another_one(begins, status, text, monkeypatch):
    """After each loss with a longer pause, in which the router notices it. A stream ends with an error."""
    monkeypatch.setattr(cluster, "LOST_SECONDS", 0.02)
    config, replicas = resolve(ServeConfig, {"model": "smollm2", "cluster": "local"}), Replicas(*begins)
    front = cluster.Front(replicas, config, "h2o")
    answer = TestClient(front.app()).post("/v1/completions", json={"prompt": "x"})
    assert (answer.status_code, text in answer.text, len(replicas.times)) == (status, True, len(begins))
    waits = [after - before for before, after in zip(replicas.times, replicas.times[1:], strict=False)]
    assert all(wait >= 0.02 * 2**number for number, wait in enumerate(waits))
    assert asyncio.run(front.drain()) == 0  # no open request is left


# ---- on a cluster


@pytest.fixture(scope="module")
def served(tiny, tmp_path_factory):
    folder = saved(tiny, tmp_path_factory.mktemp("replicas"))
    environment = {ray_worker.PYTHON: started(), "AG_API_KEY": KEY}
    with server(folder, "cluster=local", "replicas=2", *KEYS, script=Path(replicas.__file__), **environment) as found:
        yield found


def post(address, body, kind="completions"):
    body = {"model": "tiny", "temperature": 0} | body
    return httpx.post(f"{address}/v1/{kind}", json=body, headers=HEADERS, timeout=90)


def streamed(answer):
    """The events of a stream but [DONE]."""
    events = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line.startswith("data: ")]
    return [json.loads(event) for event in events if event != "[DONE]"]


def figures(address, name):
    """A figure by replica, summed over its other labels."""
    text, found = httpx.get(f"{address}/metrics", headers=HEADERS, timeout=30).text, Counter()
    for line in text.splitlines():
        if line.startswith(f"{name}{{"):
            found[line.partition('replica="')[2].partition('"')[0]] += float(line.rpartition(" ")[2])
    return found


def running_replicas():
    """The processes of the replicas."""
    below = psutil.Process().children(recursive=True)
    return [one for one in below if one.name() == "ray::ServeReplica:ag:model"]


def until(holds, seconds=60):
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.nightly
def test_two_replicas_answer_as_the_model_alone(tiny, served):
    """Whole answers and streams; both replicas take part, and each conversation stays at one of them."""
    address, prompts = served[0], [f"{number} is the number of this prompt" for number in range(24)]
    before = figures(address, "ag_answers_ended_total")
    with ThreadPoolExecutor(8) as pool:
        bodies = [{"prompt": prompt, "max_tokens": 9, "stream": number < 6} for number, prompt in enumerate(prompts)]
        answers = [*pool.map(lambda body: post(address, body), bodies)]
    texts = ["".join(event["choices"][0]["text"] for event in streamed(answer)) for answer in answers[:6]]
    texts += [answer.json()["choices"][0]["text"] for answer in answers[6:]]
    requests = [Request(tokens=byte_tokenizer()(prompt)["input_ids"], max_tokens=9) for prompt in prompts]
    assert texts == [said(alone(tiny, ag.policy("h2o", 0.5), request)) for request in requests]
    ended = figures(address, "ag_answers_ended_total") - before
    assert len(ended) == 2 and ended.total() == 24
    assert httpx.get(f"{address}/metrics").status_code == 401
    assert post(address, {"prompt": "x" * 2**21}).status_code == 413
    wrong = post(address, {"prompt": "x", "max_tokens": LONG + 1})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "max_tokens")
    live = httpx.get(f"{address}/live", headers=HEADERS).json()
    assert (live["model"], live["policy"], live["status"]) == ("tiny", "h2o 0.5", "ok")
    for number in range(3):
        ended, reused = (figures(address, name) for name in ("ag_answers_ended_total", "ag_prompt_tokens_reused_total"))
        messages = [{"role": "user", "content": f"{number}: {'a long question, ' * 9}"}]
        for _ in range(3):
            answer = post(address, {"messages": messages, "max_tokens": 8}, "chat/completions").json()
            messages += [answer["choices"][0]["message"], {"role": "user", "content": "Go on."}]
        ended = figures(address, "ag_answers_ended_total") - ended
        reused = figures(address, "ag_prompt_tokens_reused_total") - reused
        assert [*ended.values()] == [3.0] and reused.keys() == ended.keys() and reused.total() > 64


@pytest.mark.slow
@pytest.mark.nightly
def test_a_replica_that_is_killed(served):
    """Another replica gives whole answers, streams end with an error; the replica is replaced."""
    address, body = served[0], {"max_tokens": 400} | NEVER
    prompts = [f"{number} will be asked for" for number in range(10)]  # one replica has room for twice as many
    with ThreadPoolExecutor(20) as pool:
        whole = [pool.submit(post, address, body | {"prompt": prompt}) for prompt in prompts]
        streams = [pool.submit(post, address, body | {"prompt": prompt, "stream": True}) for prompt in prompts]
        until(lambda: min(figures(address, "ag_steps_total").values()) > 0 and len(figures(address, "ag_answers")) == 2)
        until(lambda: all(number > 2 for number in figures(address, "ag_answers").values()))
        running = running_replicas()
        assert len(running) == 2
        running[0].kill()
        whole, streams = ([answer.result() for answer in answers] for answers in (whole, streams))
    ends = [streamed(answer)[-1] for answer in streams]
    broken = [end for end in ends if "error" in end]
    assert broken and all(end["error"]["type"] == "server_error" for end in broken)
    assert all("error" in end or end["choices"][0]["finish_reason"] == "length" for end in ends)
    again = [post(address, body | {"prompt": prompt}).json()["choices"][0]["text"] for prompt in prompts]
    assert [answer.json()["choices"][0]["text"] for answer in whole] == again
    until(lambda: len(figures(address, "ag_answers")) == 2)


@pytest.mark.slow
@pytest.mark.nightly
def test_sigterm_lets_answers_end_and_refuses_new_requests(served):
    """The last test: it ends the server."""
    address, process = served
    until(lambda: len(running_replicas()) == 2)
    running = running_replicas()
    body = {"model": "tiny", "prompt": "x", "max_tokens": 1500, "stream": True} | NEVER
    asking = httpx.stream("POST", f"{address}/v1/completions", json=body, headers=HEADERS, timeout=60)
    with httpx.Client() as watcher, asking as answer:
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


@pytest.mark.slow
@pytest.mark.nightly
def test_an_answer_that_is_cut_at_the_end_has_its_text(tiny, tmp_path):
    """The server's time for open answers is over: a stream and a whole answer end with what was written."""
    environment = {ray_worker.PYTHON: started(), "AG_API_KEY": KEY, "AG_DRAIN_SECONDS": "0.5"}
    folder, body = saved(tiny, tmp_path), {"prompt": "x", "max_tokens": LONG} | NEVER
    script = Path(replicas.__file__)
    with (
        server(folder, "cluster=local", "replicas=1", *KEYS, script=script, **environment) as (address, process),
        ThreadPoolExecutor(2) as pool,
    ):
        whole = pool.submit(post, address, body)
        stream = pool.submit(post, address, body | {"stream": True})
        until(lambda: figures(address, "ag_answers").total() == 2)
        process.send_signal(signal.SIGTERM)
        whole, events = whole.result().json(), streamed(stream.result())
        assert process.wait(60) == 0
    tokens = whole["usage"]["completion_tokens"]
    assert 0 < tokens < LONG and whole["choices"][0]["finish_reason"] == "length" and whole["choices"][0]["text"]
    assert events[-1]["choices"][0]["finish_reason"] == "length"
    assert "".join(event["choices"][0]["text"] for event in events)
