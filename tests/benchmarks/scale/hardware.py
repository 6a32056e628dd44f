"""GPUs, hosts and the object store: figures with unit and source, and what software reaches of them.

Units are bytes, seconds, operations (a multiply-add is two) and bytes a second in one direction.
"""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """A GPU and the network around it, as their vendor says."""

    name: str
    flops: float
    """Dense bfloat16 operations a second."""
    memory: float
    bandwidth: float
    """Of its memory."""
    link: float
    """To each of the other GPUs of the machine together (NVLink)."""
    network: float
    """To other machines; one adapter a GPU."""
    per_machine: int
    """GPUs that share the link."""
    source: str

    def collective_bandwidth(self, gpus: int) -> float:
        """At which each of ``gpus`` gathers or reduces: rings leave a machine through all of its adapters."""
        return self.link if gpus <= self.per_machine else min(self.link, self.network * self.per_machine)


GPUS = {
    each.name: each
    for each in (
        Gpu(
            name="A100", flops=312e12, memory=80e9, bandwidth=2.039e12, link=300e9, network=25e9, per_machine=8,
            source="NVIDIA A100 80GB SXM data sheet; DGX A100: 8 x 200 Gb/s",
        ),
        Gpu(
            name="H100", flops=989e12, memory=80e9, bandwidth=3.35e12, link=450e9, network=50e9, per_machine=8,
            source="NVIDIA H100 SXM data sheet; DGX H100: 8 x 400 Gb/s",
        ),
        Gpu(
            name="H800", flops=989e12, memory=80e9, bandwidth=3.35e12, link=200e9, network=50e9, per_machine=8,
            source="as H100 with NVLink at 400 GB/s both ways; 8 x 400 Gb/s assumed",
        ),
        Gpu(
            name="H200", flops=989e12, memory=141e9, bandwidth=4.8e12, link=450e9, network=50e9, per_machine=8,
            source="NVIDIA H200 SXM data sheet; DGX H200: 8 x 400 Gb/s",
        ),
        Gpu(
            name="H20", flops=148e12, memory=96e9, bandwidth=4.0e12, link=450e9, network=50e9, per_machine=8,
            source="resellers' specifications of the H20 96GB; 8 x 400 Gb/s assumed",
        ),
        Gpu(
            name="GB200", flops=2500e12, memory=186e9, bandwidth=8e12, link=900e9, network=50e9, per_machine=72,
            source="NVIDIA GB200 NVL72 data sheet, half of the figures with sparsity; 400 Gb/s a GPU",
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """What software reaches: the free parameters of the simulation. None was chosen looking at a figure of RL."""

    matmul: float = 0.40
    """Of ``flops``, in passes over many tokens. Llama 3 405B was pretrained at 0.38 to 0.43 (arXiv 2407.21783)."""
    bandwidth: float = 0.70
    """Of ``bandwidth``, in decoding. Serving engines are said to reach 0.6 to 0.85."""
    link: float = 0.70
    """Of ``link`` and ``network``, in collectives of large tensors. Assumed."""
    memory: float = 0.80
    """Of ``memory`` that an engine takes: `gpu_memory_utilization` in recipes of verl and NeMo RL."""
    training_memory: float = 0.60
    """Of ``memory`` for weights, gradients and optimizer; the rest is for activations. Assumed."""
    step_seconds: float = 2.0e-3
    """Of a decoding step beside reading and computing: scheduling, launches, sampling. From `DECODE_POINTS`."""
    all_reduce_seconds: float = 23.6e-6
    """Of one small all-reduce of tensor parallelism, two a layer. From `DECODE_POINTS`."""


@dataclass(frozen=True, kw_only=True)
class DecodePoint:
    """A published latency of a batch that an engine decodes to its end."""

    model: str
    gpu: str
    tensor_parallel: int
    rows: int
    prompt_tokens: int
    new_tokens: int
    seconds: float


DECODE_SOURCE = "https://buildkite.com/vllm/performance-benchmark/builds/9515 (vLLM's own benchmark, latency tests)"
DECODE_POINTS = (
    DecodePoint(
        model="llama-8b", gpu="H200", tensor_parallel=1, rows=8, prompt_tokens=32, new_tokens=128, seconds=0.833,
    ),
    DecodePoint(
        model="llama-70b", gpu="H200", tensor_parallel=4, rows=8, prompt_tokens=32, new_tokens=128, seconds=2.078,
    ),
)  # fmt: skip
"""``step_seconds`` and ``all_reduce_seconds`` are set so that these two come out."""


@dataclass(frozen=True, kw_only=True)
class Host:
    """The processor side of a machine, and the workflow."""

    hash_rate: float = 0.74e9
    """sha256 of one stream, bytes a second: 142 MB in 193 ms (docs/benchmarks.md, Generation)."""
    digest_rate: float = 1.8e9
    """BLAKE3 of one thread: 2.4 times that of sha256, by their processor time (docs/benchmarks.md, Generation)."""
    write_rate: float = 0.66e9
    """Tensors to a file in the page cache: 142 MB in 216 ms (same table)."""
    streams: int = 1
    """Hashes, digests and writes of one policy at a time; one in today's code."""
    pcie: float = 45e9
    """Between GPU and host memory: 0.7 of a PCIe 5.0 x16 slot (64e9)."""
    task_seconds: float = 0.017
    """Of the workflow, a task: 150 ms an iteration of 9 on workers (docs/benchmarks.md, What the workflow costs)."""
    unhidden: float = 0.45
    """Of that, with overlap: 70 of 160 ms (docs/benchmarks.md, Overlap)."""
    reward_seconds: float = 28e-6
    """Of a row, in one process: `gsm8k` in a file of one's own (docs/benchmarks.md, Rewards)."""
    advantage_seconds: float = 5e-9
    """Of a token, an outcome estimator (docs/benchmarks.md, Algorithms)."""


@dataclass(frozen=True, kw_only=True)
class ObjectStore:
    """S3, as its documentation says."""

    latency: float = 0.15
    """Of a small request, 100 to 200 ms (AWS, Best practices design patterns: optimizing Amazon S3 performance)."""
    rate: float = 12.5e9
    """Of one machine: up to 100 Gb/s (same page), with enough requests at a time."""
    commit_requests: int = 5
    """One after another: read a manifest and its parts; write parts, the manifest, the index."""
