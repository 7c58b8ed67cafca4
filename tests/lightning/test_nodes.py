"""More than one machine: the README's training scripts on two nodes, and a trainer whose nodes do not step together.

The text that runs is the README's. Changed are what a user changes, too (the mailbox, and what `Trainer` is told of
the nodes), and `training_step`, which also notes its batch. Nodes are processes on loopback; they share a bucket.
"""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import signal
import socket
import subprocess
import sys
import threading
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from shardqueue import Session, SharedQueueDataset

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from conftest import S3Server
    from ranks import Ranks

README = Path(__file__).parent.parent.parent / "README.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
LIGHTNING = next(block for block in BLOCKS if "SharedQueueDataModule(" in block)
LOOP = next(block for block in BLOCKS if "group=dist.group.WORLD" in block)

ROWS, EPOCHS = 900, 2
STEPS = EPOCHS * 57
"""Of each of two ranks: 113 batches an epoch."""
PREDICTED = 100
PATIENCE = 150.0
NODES = 2
ON_NODES = f"devices=1, num_nodes={NODES}"
"""What a Trainer is told of nodes with one device each."""

NOTE = """
import json
from pathlib import Path

trained, repeated = [], []


def note(model, x):
    if model.trainer.training:
        if model.trainer.datamodule.repeating:
            repeated.append(len(x))
        else:
            trained.extend(x[:, 0].tolist())


def said():
    return {
        "trained": trained,
        "repeated": repeated,
        "steps": trainer.global_step,
        "weights": torch.cat([one.detach().flatten() for one in model.parameters()]).tolist(),
        "predictions": predictions.flatten().tolist(),
        "own": sum(len(output) for output in outputs),
        "environment": type(trainer.strategy.cluster_environment).__name__,
    }

"""
SAY = """
    Path(f"said-{trainer.global_rank}.json").write_text(json.dumps(said()))
"""


# -- the README's script on several nodes ----------------------------------------------------------------


def on_two(mailbox: str, settings: str, workers: int) -> str:
    """The README's Lightning script for two ranks with these settings of the Trainer, with what it trains noted."""
    text: str = LIGHTNING
    for old, new in (
        ('"./queue"', repr(mailbox)),
        ("num_workers=2", f"num_workers={workers}"),
        ("Trainer(", f'Trainer(accelerator="cpu", strategy="ddp", {settings}, '),
        ("x, y = batch", "x, y = batch\n        note(self, x)"),
    ):
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    return NOTE + text


def check(said: Sequence[dict[str, Any]], environment: str) -> None:
    """Every row once an epoch, by value, over both nodes; the same model on both; predictions in order."""
    assert [one["environment"] for one in said] == [environment] * NODES
    assert [one["steps"] for one in said] == [STEPS] * NODES
    rows = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(0))
    assert Counter(row for one in said for row in one["trained"]) == Counter(rows[:, 0].tolist() * EPOCHS)
    assert all(one["trained"] for one in said)
    assert sum(len(one["repeated"]) for one in said) == EPOCHS, (
        "113 batches leave one of two ranks without a last one"
    )
    assert said[0]["weights"] == said[1]["weights"]
    weights = torch.tensor(said[0]["weights"])
    first = torch.randn(PREDICTED, 16, generator=torch.Generator().manual_seed(0))
    expected = first @ weights[:16] + weights[16]
    for one in said:
        assert torch.allclose(torch.tensor(one["predictions"]), expected, atol=1e-4)
    assert sum(one["own"] for one in said) == PREDICTED


def run_script(rank: int, text: str, changes: dict[str, str | None]) -> dict[str, Any]:
    """In a rank, as on a node of its own: run the script in this environment; None takes a variable away."""
    for name, value in changes.items():
        os.environ.pop(name, None)
        if value is not None:
            os.environ[name] = value.replace("RANK", str(rank))
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(text, "train.py", "exec"), names)
    said: dict[str, Any] = names["said"]()
    return said


TORCHRUN: dict[str, str | None] = {
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "RANK",
    "GROUP_WORLD_SIZE": str(NODES),
    "NODE_RANK": "RANK",
}
"""What each of two `torchrun --nproc-per-node=1` tells its process, beside the usual."""

SLURM: dict[str, str | None] = {
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": str(NODES),
    "SLURM_NTASKS_PER_NODE": "1",
    "SLURM_NNODES": str(NODES),
    "SLURM_NODELIST": "127.0.0.1",
    "SLURM_PROCID": "RANK",
    "SLURM_NODEID": "RANK",
    "SLURM_LOCALID": "0",
    # All that another launcher would say.
    **dict.fromkeys(["TORCHELASTIC_RUN_ID", "MASTER_ADDR", "MASTER_PORT", "RANK", "WORLD_SIZE"]),
    **dict.fromkeys(["LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK"]),
}
"""What `srun` tells each of two tasks on nodes of their own."""


def slurm_job() -> dict[str, str | None]:
    """A job whose number makes a free port: Lightning meets at 15000 and its last four digits."""
    for _ in range(50):
        number = random.SystemRandom().randrange(10_000)
        with socket.socket() as trial:
            try:
                trial.bind(("127.0.0.1", 15_000 + number))
            except OSError:
                continue
        return {"SLURM_JOB_ID": f"7{number:04d}"}
    raise RuntimeError("no free port")


def credentials(server: S3Server) -> dict[str, str]:
    return {
        "AWS_ACCESS_KEY_ID": server.writer["key"],
        "AWS_SECRET_ACCESS_KEY": server.writer["secret"],
        "AWS_ENDPOINT_URL": server.endpoint,
    }


@pytest.mark.s3
@pytest.mark.parametrize(
    ("launcher", "environment"), [(TORCHRUN, "TorchElasticEnvironment"), (SLURM, "SLURMEnvironment")]
)
def test_script_trains_every_row_once_on_two_nodes(
    launcher: dict[str, str | None],
    environment: str,
    ranks: Callable[[int], Ranks],
    s3_server: S3Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    job = slurm_job() if launcher is SLURM else {}
    text = on_two(f"s3://shardqueue/nodes/{environment}", ON_NODES, workers=0)
    said = ranks(NODES).run(run_script, text, launcher | job | credentials(s3_server))
    check(said, environment)


@pytest.mark.full
@pytest.mark.s3
def test_two_torchruns_train_every_row_once(s3_server: S3Server, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(on_two("s3://shardqueue/nodes/torchruns", ON_NODES, workers=2) + SAY)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    meeting = [
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint=127.0.0.1:{port}",
        "--rdzv-id=job",
        "--local-addr=127.0.0.1",
    ]
    torchrun = [
        "-m",
        "torch.distributed.run",
        f"--nnodes={NODES}",
        "--nproc-per-node=1",
        *meeting,
        "train.py",
    ]
    check(launch([torchrun] * NODES, tmp_path, credentials(s3_server)), "TorchElasticEnvironment")


@pytest.mark.full
def test_script_that_lightning_launches_trains_every_row_once(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(on_two("./queue", "devices=2", workers=2) + SAY)
    check(launch([["train.py"]], tmp_path, {}), "LightningEnvironment")


def launch(commands: list[list[str]], folder: Path, environment: dict[str, str]) -> list[dict[str, Any]]:
    """Run Python with these arguments at once, each as on a node of its own; return what the ranks say."""
    here = {"PYTHONPATH": str(README.parent), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    logs = [folder / f"{node}.log" for node in range(len(commands))]
    nodes = []
    for command, log in zip(commands, logs, strict=True):
        with log.open("wb") as file:
            node = subprocess.Popen(
                [sys.executable, *command],
                cwd=folder,
                env={**os.environ, **here, **environment},
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
        nodes.append(node)
    try:
        codes = [node.wait(PATIENCE) for node in nodes]
    finally:
        for node in nodes:
            if node.poll() is None:
                os.killpg(node.pid, signal.SIGKILL)
                node.wait()
    assert not any(codes), "\n".join(log.read_text(errors="replace")[-4000:] for log in logs)
    return [json.loads((folder / f"said-{rank}.json").read_text()) for rank in range(NODES)]


# -- the README's DDP loop -------------------------------------------------------------------------------


def run_loop(rank: int, text: str) -> tuple[list[float], list[float], int]:
    """In a rank: run the loop; return what was trained and no repeat, the weights, and the turns."""
    names: dict[str, Any] = {"__name__": "__main__", "trained": [], "turns": []}
    exec(compile(text, "ddp.py", "exec"), names)
    weights = [one.detach().flatten() for one in names["model"].parameters()]
    return names["trained"], torch.cat(weights).tolist(), len(names["turns"])


def test_ddp_loop_trains_every_row_on_two_ranks(
    ranks: Callable[[int], Ranks], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    stepping = "            optimizer.step()\n"
    assert LOOP.count(stepping) == 1
    noting = "            turns.append(0); trained.extend([] if session.lockstep.repeating else x[:, 0].tolist())\n"
    said = ranks(NODES).run(run_loop, LOOP.replace(stepping, stepping + noting))
    rows = torch.randn(ROWS, 16, generator=torch.Generator().manual_seed(0))[:, 0].tolist()
    assert Counter(row for trained, _, _ in said for row in trained) == Counter(rows * EPOCHS)
    assert [turns for _, _, turns in said] == [STEPS] * NODES
    assert said[0][1] == said[1][1]


# -- nodes that do not step together ---------------------------------------------------------------------


@pytest.mark.skipif(importlib.util.find_spec("gradientmail") is None, reason="gradientmail is not installed")
@pytest.mark.parametrize("workers", [0, 2])
def test_gradientmail_nodes_train_every_row_once(workers: int, tmp_path: Path) -> None:
    gradientmail = pytest.importorskip("gradientmail")
    rows = TensorDataset(torch.arange(480.0).unsqueeze(1))
    mail = gradientmail.MemoryMailbox()
    both_train = threading.Barrier(2)
    trained: dict[str, list[int]] = {"node-a": [], "node-b": []}
    failures: list[BaseException] = []

    def train(name: str) -> None:
        model = torch.nn.Linear(1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-9)
        dataset = SharedQueueDataset.from_dataset(
            rows, tmp_path, batch_size=8, unit_batches=2, with_step=True, learner_id=name
        )
        loader = DataLoader(
            dataset, batch_size=None, num_workers=workers, multiprocessing_context="fork" if workers else None
        )
        node = gradientmail.Session(
            model,
            algorithm=gradientmail.DiLoCo(sync_every=5, fragments=2),
            mailbox=mail,
            node_id=name,
            poll_interval=0.05,
        )
        with Session(tmp_path, name) as session:

            def train_step(item: Any) -> int:
                _, (x,) = item
                if not trained[name]:
                    both_train.wait(60)
                loss = model(x).square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                session.step(samples=len(x))
                trained[name].extend(x[:, 0].int().tolist())
                return len(x)

            node.run(train_step, session.track(loader))

    def guarded(name: str) -> None:
        try:
            train(name)
        except BaseException as error:
            both_train.abort()
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(name,)) for name in trained]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert all(trained.values())
    assert sorted(trained["node-a"] + trained["node-b"]) == list(range(480))
