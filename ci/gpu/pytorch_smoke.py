#!/usr/bin/env python3
"""PyTorch over the preloaded libnccl: which library answers, collectives with exact checks, streams, graphs, DDP.

    LD_PRELOAD=.../libnccl.so NCCL_MULTI_RANK_GPU_ENABLE=1 pytorch_smoke.py --ranks 2

starts that many processes, all on the first GPU. Each step ends with one line: 'ok NAME'; 'refused NAME: why' where the
library may refuse a call that it does not have yet, with its sentence; or 'failed NAME: why'. 'time NAME us' are
figures. The last line is 'N passed, N failed'. A step that takes longer than --limit seconds ends its process with the
stacks of all threads, and then the others.
"""
import argparse
import ctypes
import faulthandler
import os
import re
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta

LAST_STEP = "destroy_again"
SECOND_PORT = "SECOND_MASTER_PORT"


def launch(ranks, limit_s, split):
    """Starts the ranks, passes their lines on, and counts the steps that all of them came through."""
    # A port for each of the two process groups: a rank that is early must not meet the store of the first again.
    with socket.socket() as first, socket.socket() as second:
        first.bind(("127.0.0.1", 0))
        second.bind(("127.0.0.1", 0))
        ports = {"MASTER_PORT": str(first.getsockname()[1]), SECOND_PORT: str(second.getsockname()[1])}
    shared = {"WORLD_SIZE": str(ranks), "MASTER_ADDR": "127.0.0.1", "CUDA_VISIBLE_DEVICES": "0", **ports}
    command = [sys.executable, os.path.abspath(__file__), "--limit", str(limit_s), *(["--split"] if split else [])]
    processes, readers, lines = [], [], []
    for rank in range(ranks):
        process = subprocess.Popen(
            command,
            env={**os.environ, **shared, "RANK": str(rank), "LOCAL_RANK": "0", "PYTHONUNBUFFERED": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        processes.append(process)
        readers.append(threading.Thread(target=forward, args=(rank, process, lines), daemon=True))
        readers[-1].start()
    failed_since = None
    while any(process.poll() is None for process in processes):
        time.sleep(0.1)
        if failed_since is None and any(process.poll() not in (None, 0) for process in processes):
            failed_since = time.monotonic()
        # The others get a moment to say what they see.
        if failed_since is not None and time.monotonic() - failed_since > 20:
            for rank, process in enumerate(processes):
                if process.poll() is None:
                    print(f"failed rank {rank}: still ran 20 s after another rank had ended", flush=True)
                    process.kill()
    for reader in readers:
        reader.join(5)
    return verdict(processes, lines)


def forward(rank, process, lines):
    """Rank 0's lines as they are, those of the others with their rank in front; failures of all bare."""
    for line in process.stdout:
        lines.append((rank, line.rstrip()))
        plain = rank == 0 or line.startswith("failed ")
        print(line.rstrip() if plain else f"[{rank}] {line.rstrip()}", flush=True)


def verdict(processes, lines):
    """The last line, and the exit status: every step of rank 0 ended well on every rank, and every process with 0."""
    steps = [text.split()[1].rstrip(":") for rank, text in lines if rank == 0 and re.match(r"(ok|refused|failed) ", text)]
    passed = failed = 0
    for step in steps:
        good = all(
            any(rank == r and re.match(rf"(ok|refused) {re.escape(step)}(:|$)", text) for r, text in lines)
            for rank in range(len(processes))
        )
        passed += good
        failed += not good
    for rank, process in enumerate(processes):
        if process.poll() != 0:
            last = next((text for r, text in reversed(lines) if r == rank and text.strip()), "no output")
            print(f"failed rank {rank}: exit status {process.poll()}; last line: {last[:200]}")
            failed += 1
    if not any(re.search(r"Ossicle [0-9]", text) for _, text in lines):
        print("failed marker: no line of NCCL_DEBUG=VERSION names Ossicle")
        failed += 1
    if LAST_STEP not in steps:
        print(f"failed end: the last step was {steps[-1] if steps else 'none'}")
        failed += 1
    print(f"{passed} passed, {failed} failed", flush=True)
    return 1 if failed or not passed else 0


class DlInfo(ctypes.Structure):
    """What dladdr says of an address."""

    _fields_ = [
        ("file_name", ctypes.c_char_p),
        ("file_base", ctypes.c_void_p),
        ("symbol_name", ctypes.c_char_p),
        ("symbol_address", ctypes.c_void_p),
    ]


class Rank:
    """One process: its rank, its device, and the steps, which run in the same order on all ranks."""

    def __init__(self, torch, limit_s):
        self.torch, self.dist = torch, torch.distributed
        self.rank, self.ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device("cuda", 0)
        self.limit_s = limit_s

    def step(self, name, body, may_be_refused=False):
        """Runs one step; a failure ends the process, since the ranks could not go on together."""
        faulthandler.dump_traceback_later(self.limit_s, exit=True)
        why = None
        try:
            body()
            # A collective that never ends shows here, under this step's name.
            self.torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 whatever a step meets is its result
            why = " ".join(f"{type(error).__name__}: {error}".split())
        faulthandler.cancel_dump_traceback_later()
        if why is None:
            print(f"ok {name}", flush=True)
        elif may_be_refused and re.search(r"ncclInvalidUsage|invalid usage", why, re.IGNORECASE):
            print(f"refused {name}: {why[-300:]}", flush=True)
        else:
            print(f"failed {name}: {why[:600]}", flush=True)
            sys.stdout.flush()
            os._exit(1)

    def tell(self, text):
        """A line of rank 0 alone."""
        if self.rank == 0:
            print(text, flush=True)

    def equal(self, found, wanted, what):
        """Every bit of two tensors, or an error that shows the first difference."""
        torch = self.torch
        wanted = wanted.to(found.device, found.dtype).expand_as(found)
        if torch.equal(found, wanted):
            return
        at = (found != wanted).flatten().nonzero().flatten()
        first = int(at[0])
        raise AssertionError(
            f"{what}: {at.numel()} of {found.numel()} elements are wrong, the first is {first}: "
            f"{found.flatten()[first].item()}, not {wanted.flatten()[first].item()}"
        )

    # Values small enough to be exact in every type, sums over 8 ranks included (at most 8 * (12 + 8) < 256).
    def values(self, rank, count, dtype):
        return ((self.torch.arange(count, device=self.device) * 7 + 3) % 13 + rank).to(dtype)

    def over_ranks(self, count, dtype):
        return self.torch.stack([self.values(rank, count, self.torch.float64) for rank in range(self.ranks)]), dtype

    # --- which library, and a process group ------------------------------------------------------------------------

    def marker(self):
        """The file behind ncclAllReduce is the one that was preloaded, and it says its version."""
        symbols = ctypes.CDLL(None)
        version = ctypes.c_int()
        assert symbols.ncclGetVersion(ctypes.byref(version)) == 0, "ncclGetVersion failed"
        info = DlInfo()
        symbols.dladdr.argtypes = [ctypes.c_void_p, ctypes.POINTER(DlInfo)]
        for name in ("ncclAllReduce", "ncclCommInitRankConfig", "pncclAllReduce"):
            address = ctypes.cast(getattr(symbols, name), ctypes.c_void_p)
            assert symbols.dladdr(address, ctypes.byref(info)), f"dladdr does not know {name}"
            file_name = os.path.realpath(os.fsdecode(info.file_name))
            preloaded = [os.path.realpath(path) for path in re.split("[: ]", os.environ.get("LD_PRELOAD", "")) if path]
            assert file_name in preloaded, f"{name} is that of {file_name}, preloaded is {preloaded}"
        self.tell(f"marker: ncclGetVersion {version.value}, torch {self.torch.__version__} built for {self.torch.cuda.nccl.version()}")

    def init_process_group(self):
        self.dist.init_process_group("nccl", timeout=timedelta(seconds=self.limit_s))

    # --- collectives -----------------------------------------------------------------------------------------------

    def all_reduce(self):
        torch, op = self.torch, self.dist.ReduceOp
        for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int32, torch.uint8):
            for count in (1, 7, 1000, 262147, 4 << 20):
                parts, _ = self.over_ranks(count, dtype)
                wants = {op.SUM: parts.sum(0), op.MAX: parts.max(0).values}
                # Exact where dividing each input by the number of ranks is: two or four of them, floats.
                if dtype.is_floating_point and self.ranks in (2, 4):
                    wants[op.AVG] = parts.sum(0) / self.ranks
                for reduction, want in wants.items():
                    tensor = self.values(self.rank, count, dtype)
                    self.dist.all_reduce(tensor, op=reduction)
                    self.equal(tensor, want, f"all_reduce {dtype} {reduction} of {count}")

    def broadcast(self):
        torch = self.torch
        for dtype in (torch.float32, torch.int64, torch.bool, torch.uint8, torch.bfloat16):
            for count in (1, 1000, 1 << 20):
                for root in range(self.ranks):
                    tensor = self.values(self.rank, count, torch.int32).remainder(2 if dtype == torch.bool else 100).to(dtype)
                    self.dist.broadcast(tensor, src=root)
                    want = self.values(root, count, torch.int32).remainder(2 if dtype == torch.bool else 100).to(dtype)
                    self.equal(tensor, want, f"broadcast {dtype} of {count} from {root}")

    def all_gather(self):
        torch = self.torch
        for dtype in (torch.float32, torch.int64, torch.uint8, torch.float16):
            for count in (1, 1001, 1 << 20):
                mine = self.values(self.rank, count, dtype)
                whole = torch.empty(self.ranks * count, dtype=dtype, device=self.device)
                self.dist.all_gather_into_tensor(whole, mine)
                want = torch.cat([self.values(rank, count, dtype) for rank in range(self.ranks)])
                self.equal(whole, want, f"all_gather_into_tensor {dtype} of {count}")
                listed = [torch.empty(count, dtype=dtype, device=self.device) for _ in range(self.ranks)]
                self.dist.all_gather(listed, mine)
                self.equal(torch.cat(listed), want, f"all_gather {dtype} of {count}")

    def all_gather_object(self):
        found = [None] * self.ranks
        self.dist.all_gather_object(found, {"rank": self.rank, "text": "x" * self.rank})
        assert found == [{"rank": rank, "text": "x" * rank} for rank in range(self.ranks)], found

    def barrier(self):
        for _ in range(3):
            self.dist.barrier()

    def side_streams(self):
        """Several operations in flight, from two streams, each result used on its stream after wait()."""
        torch = self.torch
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        count, results, works = 100003, [], []
        for i in range(12):
            with torch.cuda.stream(streams[i % 2]):
                tensor = self.values(self.rank, count, torch.float32) * (i + 1)
                work = self.dist.all_reduce(tensor, async_op=True)
                if i % 3 == 0:
                    work.wait()
                    results.append((i, tensor + 1, 1))
                else:
                    works.append((i, tensor, work))
        for i, tensor, work in works:
            with torch.cuda.stream(streams[i % 2]):
                work.wait()
                results.append((i, tensor * 2, 0))
        torch.cuda.synchronize()
        parts, _ = self.over_ranks(count, torch.float32)
        for i, tensor, added in results:
            want = parts.sum(0) * (i + 1)
            self.equal(tensor, want + 1 if added else want * 2, f"operation {i} of several in flight")

    def graph(self):
        """An all-reduce between other nodes of a graph, replayed with new inputs, an eager one between the replays."""
        torch = self.torch
        for count in (1024, 1 << 20):
            source = torch.zeros(count, device=self.device)
            self.dist.all_reduce(source.clone())
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                doubled = source * 2
                self.dist.all_reduce(doubled)
                result = doubled + 1
            parts, _ = self.over_ranks(count, torch.float32)
            for i in range(10):
                source.copy_(self.values(self.rank, count, torch.float32) + i)
                graph.replay()
                torch.cuda.synchronize()
                self.equal(result, (parts + i).sum(0) * 2 + 1, f"replay {i} of {count}")
                eager = self.values(self.rank, count, torch.float32)
                self.dist.all_reduce(eager)
                torch.cuda.synchronize()
                self.equal(eager, parts.sum(0), f"an eager all_reduce after replay {i}")
            del graph

    def another_group(self):
        """A second communicator, made as the first was."""
        group = self.dist.new_group(list(range(self.ranks)))
        tensor = self.values(self.rank, 1000, self.torch.float32)
        self.dist.all_reduce(tensor, group=group)
        parts, _ = self.over_ranks(1000, self.torch.float32)
        self.equal(tensor, parts.sum(0), "all_reduce in another group")
        self.torch.cuda.synchronize()
        self.dist.destroy_process_group(group)

    # --- DistributedDataParallel -----------------------------------------------------------------------------------

    def ddp_exact(self):
        """Gradients and weights over 5 steps equal those of one process on the whole batch, in every bit.

        Inputs and weights are integers and the rate is 2^-3, so that all values are multiples of 2^-k: each of the 5 steps adds
        at most 3 + log2(ranks) bits below the point (the rate, and the mean over ranks), 25 for 4 ranks. Above it, gradients
        stay below 2^24 (checked). Less than the 53 bits of float64 together, so no rounding whatever the order of summation.
        The outputs may round, but no gradient depends on them: the loss is their sum.
        """
        torch = self.torch
        if self.ranks not in (1, 2, 4):
            raise AssertionError("exact only where the mean over ranks is a division by a power of two")

        def network():
            generator = torch.Generator().manual_seed(7)
            layers = torch.nn.Sequential(torch.nn.Linear(12, 16), torch.nn.ReLU(), torch.nn.Linear(16, 4)).double()
            for parameter in layers.parameters():
                parameter.data = torch.randint(-2, 3, parameter.shape, generator=generator).double()
            return layers.to(self.device)

        model = torch.nn.parallel.DistributedDataParallel(network(), device_ids=[0])
        alone = network()
        for step in range(5):
            generator = torch.Generator().manual_seed(100 + step)
            batch = torch.randint(-1, 2, (2 * self.ranks, 12), generator=generator).double().to(self.device)
            for layers, rows, share in ((model, batch[2 * self.rank : 2 * self.rank + 2], 1), (alone, batch, self.ranks)):
                layers.zero_grad()
                (layers(rows).sum() / share).backward()
            for mine, wanted in zip(model.module.parameters(), alone.parameters()):
                self.equal(mine.grad, wanted.grad, f"gradients of step {step}")
                assert wanted.grad.abs().max() < 2**24, "values outgrow the exact range: the check must be changed"
                for parameter in (mine, wanted):
                    parameter.data -= parameter.grad / 8
                self.equal(mine.data, wanted.data, f"weights after step {step}")

    def ddp_transformer(self):
        """Gradients are the same in every bit on all ranks; the time of a step."""
        torch = self.torch
        torch.manual_seed(1)
        layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, dropout=0.0, batch_first=True)
        model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).to(self.device)
        model = torch.nn.parallel.DistributedDataParallel(model, device_ids=[0])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        torch.manual_seed(10 + self.rank)
        batch = torch.randn(8, 128, 512, device=self.device)
        times = []
        for step in range(15):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            optimizer.zero_grad()
            model(batch).pow(2).mean().backward()
            optimizer.step()
            torch.cuda.synchronize()
            times.append(time.perf_counter() - begun)
            if step < 5:
                gradients = torch.cat([parameter.grad.flatten() for parameter in model.parameters()])
                assert gradients.isfinite().all() and gradients.abs().max() > 0, "gradients are no numbers, or all zero"
                everyone = torch.empty(self.ranks * gradients.numel(), device=self.device)
                self.dist.all_gather_into_tensor(everyone, gradients)
                self.equal(everyone.view(self.ranks, -1), gradients, f"gradients of step {step} on all ranks")
        self.tell(f"time ddp_step_transformer_4x512 {sorted(times[5:])[5] * 1e6:.0f}")

    def times(self):
        torch = self.torch
        for name, size in (("4KiB", 4 << 10), ("1MiB", 1 << 20), ("64MiB", 64 << 20)):
            tensor = torch.zeros(size // 4, device=self.device)
            for _ in range(3):
                self.dist.all_reduce(tensor)
            torch.cuda.synchronize()
            times = []
            for _ in range(3):
                begun = time.perf_counter()
                for _ in range(20):
                    self.dist.all_reduce(tensor)
                torch.cuda.synchronize()
                times.append((time.perf_counter() - begun) / 20)
            self.tell(f"time all_reduce_{name} {min(times) * 1e6:.1f}")

    # --- what the library may not have yet -------------------------------------------------------------------------

    def reduction(self, dtype, op):
        def body():
            parts, _ = self.over_ranks(100, dtype)
            want = {"SUM": parts.sum(0), "MIN": parts.min(0).values, "PRODUCT": parts.prod(0)}[op]
            tensor = self.values(self.rank, 100, dtype)
            self.dist.all_reduce(tensor, op=getattr(self.dist.ReduceOp, op))
            self.equal(tensor, want, f"all_reduce {dtype} {op}")

        return body

    def reduce_scatter(self):
        torch = self.torch
        tensor = torch.empty(100, device=self.device)
        self.dist.reduce_scatter_tensor(tensor, self.values(self.rank, 100 * self.ranks, torch.float32))
        parts, _ = self.over_ranks(100 * self.ranks, torch.float32)
        self.equal(tensor, parts.sum(0)[100 * self.rank :][:100], "reduce_scatter_tensor")

    def reduce(self):
        tensor = self.values(self.rank, 100, self.torch.float32)
        self.dist.reduce(tensor, dst=0)
        if self.rank == 0:
            self.equal(tensor, self.over_ranks(100, None)[0].sum(0), "reduce")

    def all_to_all(self):
        torch = self.torch
        tensor = torch.empty(self.ranks * 10, device=self.device)
        try:
            self.dist.all_to_all_single(tensor, self.values(self.rank, self.ranks * 10, torch.float32))
        except Exception:
            # PyTorch leaves its group of sends and receives open where one of them fails; what follows would never start.
            ctypes.CDLL(None).ncclGroupEnd()
            raise
        parts, _ = self.over_ranks(self.ranks * 10, torch.float32)
        self.equal(tensor, parts[:, 10 * self.rank :][:, :10].flatten(), "all_to_all_single")

    def split_group(self):
        """new_group with a bound device splits the communicator of the default group."""
        group = self.dist.split_group(split_ranks=[list(range(self.ranks))])
        tensor = self.values(self.rank, 100, self.torch.float32)
        self.dist.all_reduce(tensor, group=group)
        self.equal(tensor, self.over_ranks(100, None)[0].sum(0), "all_reduce in a group that was split off")

    def run(self):
        torch = self.torch
        for name in ("marker", "init_process_group", "all_reduce", "broadcast", "all_gather", "all_gather_object", "barrier"):
            self.step(name, getattr(self, name))
        for name in ("side_streams", "graph", "another_group", "ddp_exact", "ddp_transformer", "times"):
            self.step(name, getattr(self, name))
        for dtype, op in ((torch.int64, "SUM"), (torch.float32, "MIN"), (torch.float64, "PRODUCT"), (torch.int8, "SUM")):
            self.step(f"all_reduce_{str(dtype).split('.')[1]}_{op}", self.reduction(dtype, op), may_be_refused=True)
        for name in ("reduce_scatter", "reduce", "all_to_all"):
            self.step(name, getattr(self, name), may_be_refused=True)
        self.step("all_reduce_after_refusals", self.reduction(torch.float32, "SUM"))
        self.step("destroy_process_group", self.dist.destroy_process_group)
        self.step("init_with_bound_device", self.init_bound)
        self.step("all_reduce_again", self.reduction(torch.float32, "SUM"))
        self.step(LAST_STEP, self.dist.destroy_process_group)

    def run_split(self):
        """In processes of their own: PyTorch 2.11 crashes in split_group of a process's second default group."""
        self.step("marker", self.marker)
        self.step("init_with_bound_device", self.init_bound)
        self.step("split_group", self.split_group, may_be_refused=True)
        self.step("all_reduce_after_split", self.reduction(self.torch.float32, "SUM"))
        self.step(LAST_STEP, self.dist.destroy_process_group)

    def init_bound(self):
        """A group whose communicator is made at once, since its device is named."""
        os.environ["MASTER_PORT"] = os.environ[SECOND_PORT]
        self.dist.init_process_group("nccl", timeout=timedelta(seconds=self.limit_s), device_id=self.device)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, help="start so many processes; without it this is one of them, named by RANK")
    parser.add_argument("--split", action="store_true", help="only what concerns groups that are split off")
    parser.add_argument("--limit", type=int, default=60, help="seconds for a step")
    options = parser.parse_args()
    if options.ranks:
        sys.exit(launch(options.ranks, options.limit, options.split))
    if "RANK" not in os.environ:
        parser.error("--ranks N starts the processes")
    # The import alone has hung before where a library answered wrongly.
    faulthandler.dump_traceback_later(120, exit=True)
    import torch

    torch.cuda.set_device(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    faulthandler.cancel_dump_traceback_later()
    rank = Rank(torch, options.limit)
    rank.run_split() if options.split else rank.run()


if __name__ == "__main__":
    main()
