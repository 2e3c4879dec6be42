"""How much faster two processes are than one: python tests/throughput.py, on a machine with two idle cores.

Steps of one model in one process and in two of one thread each, in turns; the ratio of examples a second, its median and its range.
With `sharded`, the model of the two is cut by fully_shard.
"""

import os
import statistics
import subprocess
import sys
import time

STEPS, WIDTH, BATCH, ROUNDS = 8, 768, 64, 5


def one_run(cut):
    "Seconds of so many steps, after one that warms up."
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.fsdp import fully_shard
    from torch.utils.data import TensorDataset

    import dpft

    torch.set_num_threads(1)
    if "WORLD_SIZE" in os.environ:
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)], nn.Flatten(), nn.LazyLinear(2))
    data = TensorDataset(torch.randn(BATCH, 64, WIDTH), torch.arange(BATCH) % 2)
    model(data[0][0][None])
    if cut:
        for layer in model[:4]:
            fully_shard(layer)
        fully_shard(model)

    def loss(model, batch):
        return nn.functional.cross_entropy(model(batch[0]), batch[1], reduction="none")

    engine = dpft.Engine(model, loss, dpft.Full(), data, noise_multiplier=1.0, batch_size=BATCH, steps=STEPS + 1, physical_batch_size=8,
                         accountant="rdp")
    optimizer = torch.optim.SGD(engine.parameters(), 1e-3)
    for step in engine:
        if step.t == 1:
            begun = time.perf_counter()
        step.take(optimizer)
    if not dist.is_initialized() or dist.get_rank() == 0:
        print(time.perf_counter() - begun)
    if dist.is_initialized():
        dist.destroy_process_group()


def seconds(processes, cut):
    launch = [] if processes == 1 else ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    ran = subprocess.run([sys.executable, *launch, __file__, "run", *(["sharded"] if cut else [])], capture_output=True, text=True,
                         env={**os.environ, "OMP_NUM_THREADS": "1"}, check=True)
    return float(ran.stdout.split()[-1])


if __name__ == "__main__":
    if "run" in sys.argv:
        one_run("sharded" in sys.argv)
    else:
        ratios = [seconds(1, False) / seconds(2, "sharded" in sys.argv) for _ in range(ROUNDS)]
        print(f"two processes: {statistics.median(ratios):.2f} of one's throughput ({min(ratios):.2f} to {max(ratios):.2f})")
