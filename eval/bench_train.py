"""Time and memory of a whole training step, beside other libraries', in interleaved rounds.

Every candidate lives in a process of its own, so that each has the allocator that its users have and a memory peak of
its own. They take turns, one step each a round, so that they share the machine's moods.
"""

import importlib.util
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import product
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from eval.timing import DTYPES, choose_device, resident_bytes, seconds
from training.distributed import start_process
from training.environment import machine
from training.flops import flops_per_token, peak_flops
from training.optimizer import Muon
from training.state import build_model, build_state
from training.step import compile_blocks, train_step, wrap


@dataclass(frozen=True)
class Candidate:
    """One way to train one model: a position scheme of ours, or one of PEERS."""

    name: str
    case: Any  # model, length, batch, and in a step of ours sequences in a forward pass
    dtype: str
    train_config: Any
    threads: int | None
    compiled: bool = False


@dataclass(frozen=True)
class Trainer:
    """A training step and what belongs to it."""

    step: Callable[[], object]
    parameters: int
    flops_per_token: float | None = None
    update: Callable[[], object] | None = None  # the optimizers' part of the step


def bench_train(config: Any, train_config: Callable[[str, str, int], Any]) -> dict[str, Any]:
    """Measures a training step of every peer and scheme, for every case and dtype; {"machine": {...}, "rows": [...]}.

    A row has the median `seconds` of a step, `tokens_per_second`, `peak_bytes` (weights, gradients, optimizer,
    activations: all but what the imported libraries take; None where the system cannot tell), and as ratios to the
    first of `peers` (without peers, of `positions`) `ratio`, of the time, and `memory_ratio`; `ratio_to_first` is that
    of the time to the first of `positions`. Rows of ours also have `optimizer_share` of the step, and `utilisation`:
    the floating-point operations of the model's products per second as a share of `peak_tflops`, or where that is null
    of what the card can do by its data sheet, and on a CPU of what its products of large matrices are measured to do.
    The last rows compare the update of the matrices alone with torch.optim.Muon's.

    Args:
        config: of configs/bench_train.yaml.
        train_config: gives the config of train.py for a model, a position scheme and a length.

    Raises ValueError, before any measurement, for a key that can't be served.
    """
    device = _checked(config)
    groups = [
        [
            # a peer is told the sizes by the first scheme's config
            Candidate(name, case, dtype, train_config(case.model, position, case.length), config.threads, compiled)
            for name, position, compiled in [
                *((peer, config.positions[0], False) for peer in config.peers),
                *((p, p, compiled) for p in config.positions for compiled in _compiled(config, device)),
            ]
        ]
        for case, dtype in product(config.cases, config.dtypes)
    ]
    rows: list[dict[str, Any]] = []
    for group in tqdm(groups, desc="cases", disable=None):
        rows += _measure(group, config, device)
    for model in {case.model: None for case in config.cases}:
        rows += _muon_rows(train_config(model, config.positions[0], 1), device)
    return {"machine": machine(device), "rows": rows}


def _compiled(config: Any, device: torch.device) -> list[bool]:
    return [choice == "True" or (choice == "auto" and device.type == "cuda") for choice in config.compile]


def _measure(group: list[Candidate], config: Any, device: torch.device) -> list[dict[str, Any]]:
    with ExitStack() as stack:
        links = [stack.enter_context(_worker(candidate, device)) for candidate in group]
        rounds = [[_ask(link, "seconds") for link in links] for _ in range(config.repeats)]
        facts = [_ask(link, "facts") for link in links]
        updates = [_ask(link, "update") for link in links]
    times = list(zip(*rounds, strict=True))
    first = times[len(config.peers)]
    peak = _peak_flops(config, group[0].dtype, device)
    rows = []
    for candidate, fact, took, update in zip(group, facts, times, updates, strict=True):
        case, speed = candidate.case, candidate.case.length * candidate.case.batch / statistics.median(took)
        flops = fact.pop("flops_per_token")
        rows.append(
            {
                "name": f"{case.model} {candidate.name}{' compiled' * candidate.compiled} {candidate.dtype} "
                f"T={case.length} B={case.batch}",
                "candidate": candidate.name,
                "compiled": candidate.compiled,
                "model": case.model,
                "length": case.length,
                "batch": case.batch,
                "micro_batch": _micro_batch(case),
                "dtype": candidate.dtype,
                "seconds": statistics.median(took),
                "tokens_per_second": speed,
                **fact,
                "ratio": _ratio(took, times[0]),
                "memory_ratio": fact["peak_bytes"] and fact["peak_bytes"] / facts[0]["peak_bytes"],
                "ratio_to_first": _ratio(took, first),
                "optimizer_share": update and update / statistics.median(took),
                "utilisation": flops and peak and flops * speed / peak,
            }
        )
    return rows


def _ratio(times: tuple[float, ...], reference: tuple[float, ...]) -> float:
    """The median of the ratios within a round."""
    return statistics.median(a / b for a, b in zip(times, reference, strict=True))


def _peak_flops(config: Any, dtype: str, device: torch.device) -> float | None:
    if config.peak_tflops is not None:
        return 1e12 * config.peak_tflops
    if device.type != "cpu":
        return peak_flops(device) if dtype == "bf16" else None
    size = 1024
    a = torch.ones(size, size, dtype=DTYPES[dtype])
    before = torch.get_num_threads()
    torch.set_num_threads(config.threads or before)
    shortest = _best(lambda: a @ a, device, most_seconds=2.0)
    torch.set_num_threads(before)
    return 2 * size**3 / shortest


@contextmanager
def _worker(candidate: Candidate, device: torch.device) -> Iterator[Connection]:
    """A process that builds the candidate and then answers questions about it."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe()
    process = context.Process(target=_answer, args=(there, candidate, device), daemon=True)
    process.start()
    there.close()
    try:
        yield here
    finally:
        here.close()  # ends the worker's loop
        process.join(timeout=10)
        process.kill()


def _ask(link: Connection, question: str) -> Any:
    try:
        link.send(question)
        return link.recv()
    except (EOFError, BrokenPipeError) as error:
        raise RuntimeError("a measured process ended early; its own message stands above (out of memory?)") from error


def _answer(link: Connection, candidate: Candidate, device: torch.device) -> None:
    if candidate.threads is not None:
        torch.set_num_threads(candidate.threads)
    with ExitStack() as stack:
        build = PEERS.get(candidate.name, _ours)
        before = _memory(device)
        trainer = build(candidate, device, stack)
        trainer.step()
        answers: dict[str, Callable[[], Any]] = {
            "seconds": lambda: seconds(trainer.step, device),
            "facts": lambda: {
                "parameters": trainer.parameters,
                "flops_per_token": trainer.flops_per_token,
                "peak_bytes": None if before is None else (_memory(device, peak=True) or 0) - before,
            },
            "update": lambda: trainer.update and _best(trainer.update, device),
        }
        while True:
            try:
                question = link.recv()
            except EOFError:
                return
            link.send(answers[question]())


def _best(part: Callable[[], object], device: torch.device, most_seconds: float = 10.0) -> float:
    """The shortest of up to four calls; no further one once they have taken `most_seconds`."""
    times: list[float] = []
    while len(times) < 4 and sum(times) < most_seconds:
        times.append(seconds(part, device))
    return min(times)


def _memory(device: torch.device, peak: bool = False) -> int | None:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) if peak else torch.cuda.memory_allocated(device)
    try:
        return resident_bytes("VmHWM" if peak else "VmRSS")
    except OSError:
        return None


def _batch(candidate: Candidate, vocab_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    return torch.randint(vocab_size, (candidate.case.batch, candidate.case.length + 1), generator=generator)


def _ours(candidate: Candidate, device: torch.device, stack: ExitStack) -> Trainer:
    """The step of train.py."""
    process = stack.enter_context(start_process(device.type, candidate.dtype))
    state = build_state(candidate.train_config, device)
    if candidate.compiled:
        compile_blocks(state.model)
    model = state.model
    forward, tokens = wrap(model, process), _batch(candidate, model.config.vocab_size)

    def step() -> object:
        return train_step(state, forward, tokens[:, :-1], tokens[:, 1:], _micro_batch(candidate.case), 1.0, process)

    def update() -> None:
        for optimizer in state.optimizers:
            for parameter in (parameter for group in optimizer.param_groups for parameter in group["params"]):
                if parameter.grad is None:  # in the first call
                    parameter.grad = torch.ones_like(parameter)
            optimizer.step()

    return Trainer(step, _count(model), flops_per_token(model, candidate.case.length), update)


def _micro_batch(case: Any) -> int:
    return case.get("micro_batch") or case.batch


def _muon_rows(train_config: Any, device: torch.device) -> list[dict[str, Any]]:
    """The update of a model's matrices by our Muon and by torch.optim.Muon."""
    matrices = [parameter for parameter in build_model(train_config, device).blocks.parameters() if parameter.ndim == 2]
    for matrix in matrices:
        matrix.grad = torch.randn_like(matrix)
    name = f"{train_config.model.name} Muon of {len(matrices)} matrices"
    ours = _best(Muon(matrices, lr=0.0).step, device)
    torchs = _best(torch.optim.Muon(matrices, lr=0.0, weight_decay=0.0).step, device)
    return [
        {"name": name, "seconds": ours, "ratio": 1.0},
        {"name": f"{name}, torch.optim.Muon", "seconds": torchs, "ratio": torchs / ours},
    ]


def _count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _transformers(candidate: Candidate, device: torch.device, stack: ExitStack) -> Trainer:
    """GPT-2 of the same size as users of transformers train it: labels, AdamW (fused, as its Trainer's), autocast."""
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes, case = candidate.train_config.model, candidate.case
    gpt2 = GPT2Config(
        vocab_size=sizes.vocab_size,
        n_positions=case.length,
        n_embd=sizes.width,
        n_layer=sizes.n_layer,
        n_head=sizes.n_head,
        bos_token_id=0,
        eos_token_id=0,
    )
    model = GPT2LMHeadModel(gpt2).to(device).train()  # pyright: ignore[reportArgumentType]
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5, fused=True)
    tokens = _batch(candidate, sizes.vocab_size)[:, :-1].to(device)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=candidate.dtype == "bf16"):
            loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return Trainer(step, _count(model))


PEERS = {"transformers": _transformers}


def _checked(config: Any) -> torch.device:
    for peer in config.peers:
        if peer not in PEERS:
            raise ValueError(f"peers={list(config.peers)}: {peer!r} is unknown; use {', '.join(PEERS)}, or peers=[]")
        if importlib.util.find_spec(peer) is None:
            raise ValueError(
                f"peers={list(config.peers)}: {peer} is not installed; pip install -r requirements-bench.txt"
            )
    if not config.positions:
        raise ValueError("positions=[] must hold at least one scheme, such as positions=[rope]")
    if not config.cases:
        raise ValueError("cases=[] must hold at least one, such as cases=[{model:proxy,length:256,batch:32}]")
    if unknown := set(config.dtypes) - {"fp32", "bf16"}:
        raise ValueError(f"dtypes={list(config.dtypes)}: {min(unknown)!r} is unknown; use fp32, bf16 (autocast)")
    if not config.compile or not set(config.compile) <= {"auto", "True", "False"}:
        raise ValueError(f"compile={list(config.compile)} must hold auto (on CUDA, as train.py does), true or false")
    numbers = {"repeats": config.repeats, "threads": config.threads}
    for index, case in enumerate(config.cases):
        numbers |= {f"cases[{index}].{key}": case.get(key) for key in ("length", "batch", "micro_batch")}
    for key, value in numbers.items():
        if value is not None and value < 1:
            raise ValueError(f"{key}={value} must be at least 1")
    for index, case in enumerate(config.cases):
        if case.batch % _micro_batch(case):
            raise ValueError(f"cases[{index}].micro_batch={case.micro_batch} must divide its batch={case.batch}")
    return choose_device(config.device)
