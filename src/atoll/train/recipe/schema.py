"""The recipe: every section and key, with its meaning, unit and default. This file is the reference."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from atoll.train.recipe.durations import LONGEST, Duration, DurationField

SCHEMA_VERSION = 1

_TEN_YEARS_S = 315_360_000.0


def _at_most(largest: int) -> AfterValidator:
    def check(number: int) -> int:
        if number > largest:
            raise ValueError(f"{number} is too large: expected at most {largest}")
        return number

    return AfterValidator(check)


def _not_empty(given: Any) -> Any:
    for text in given if isinstance(given, list) else [given]:
        if isinstance(text, str) and not text.strip():
            raise ValueError(f"{given!r} is empty: give a value, or leave the key out")
    return given


def _file_name(text: str) -> str:
    if text.strip() in ("", ".", "..") or any(mark in text for mark in "/\\\0\n"):
        raise ValueError(f"{text!r} can't be the name of a folder: expected a word without '/'")
    return text


def _local_folder(text: str) -> str:
    if "://" in text:
        raise ValueError(
            f"{text!r} is a URL, and logs go to a folder: name one, and put checkpoints there with [checkpoint] path"
        )
    _not_empty(text)
    return text


Positive = Annotated[int, Field(gt=0), _at_most(2**31)]  # of anything that is counted here
Text = Annotated[str, AfterValidator(_not_empty)]
Paths = Annotated[str | list[str], AfterValidator(_not_empty)]
Timeout = Annotated[float, Field(gt=0, le=_TEN_YEARS_S)]
NonNegative = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
AxisSize = Annotated[int, Field(ge=-1), _at_most(2**20)]
Layers = Annotated[int, Field(gt=0), _at_most(1000)]
Width = Annotated[int, Field(gt=0), _at_most(2**24)]  # of a matrix


class Section(BaseModel):
    """A section: unknown keys are refused, values do not change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, arbitrary_types_allowed=True)


class RopeScaling(Section):
    """How rotary positions are stretched past the length they were trained on."""

    kind: Literal["llama3", "yarn"]
    factor: Annotated[float, Field(ge=1)]
    original_max_seq_len: Positive
    # llama3
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    # yarn
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    attention_factor: Annotated[float, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _check(self) -> RopeScaling:
        low, high = ("low_freq_factor", "high_freq_factor") if self.kind == "llama3" else ("beta_slow", "beta_fast")
        less, more = getattr(self, low), getattr(self, high)
        if not 0 < less < more:
            raise ValueError(f"{low} = {less:g} and {high} = {more:g}: expected 0 < {low} < {high}")
        return self


class ModelSection(Section):
    """Which network. Its dimensions derive from ``layers``, ``dim``, ``heads`` and ``hidden_dim``."""

    family: Literal["llama", "qwen3", "phi3", "gpt2"] = "llama"
    layers: Layers = 6
    dim: Width = 256
    heads: Width = 8
    kv_heads: Width | None = None  # as many as heads
    head_dim: Width | None = None  # dim / heads
    hidden_dim: Width | None = None  # of the feed-forward part; 4 dim for gpt2, 8/3 dim rounded up to 64 otherwise
    vocab_size: Width | None = None  # the tokenizer's
    max_seq_len: Positive = 2048
    tied: bool = False  # the head shares the embedding's weight
    norm_eps: Annotated[float, Field(gt=0)] = 1e-5
    rope_theta: Annotated[float, Field(gt=1)] = 10_000.0
    rope_scaling: RopeScaling | None = None
    init_scheme: Literal["zero_residual", "torchtitan", "gpt2"] | None = (
        None  # None: torchtitan if tied, else the first
    )
    init_std: Annotated[float, Field(gt=0)] | None = None  # of matrices; None: 0.02, or dim^-0.5 under zero_residual
    init: Text | None = None  # weights to start from: a hub name, a folder, a .safetensors or .gguf file
    python: str | None = None  # "pkg.module:build", called with this section, returns the model

    @model_validator(mode="after")
    def _check(self) -> ModelSection:
        if self.head_dim is None and self.dim % self.heads:
            raise ValueError(f"dim = {self.dim} is not divisible by heads = {self.heads}; set head_dim")
        if self.heads % self.num_kv_heads:
            raise ValueError(f"heads = {self.heads} is not divisible by kv_heads = {self.num_kv_heads}")
        if self.family != "gpt2" and self.size_of_head % 2:
            raise ValueError(f"head_dim = {self.size_of_head} is odd, and rotary positions need pairs")
        if self.family == "gpt2" and self.rope_scaling is not None:
            raise ValueError("rope_scaling is given, and gpt2 has no rotary positions: leave it out")
        return self

    @property
    def scheme(self) -> str:
        """The scheme of initial weights: what learnt fastest (docs/benchmarks.md)."""
        return self.init_scheme or ("torchtitan" if self.tied else "zero_residual")

    @property
    def std(self) -> float:
        """The standard deviation of the initial matrices, where the scheme says nothing else."""
        return self.init_std or (self.dim**-0.5 if self.scheme == "zero_residual" else 0.02)

    @property
    def num_kv_heads(self) -> int:
        """Heads of keys and values."""
        return self.kv_heads or self.heads

    @property
    def size_of_head(self) -> int:
        """Width of one head."""
        return self.head_dim or self.dim // self.heads

    @property
    def ffn_dim(self) -> int:
        """Width inside the feed-forward part."""
        if self.hidden_dim is not None:
            return self.hidden_dim
        return 4 * self.dim if self.family == "gpt2" else -(-8 * self.dim // (3 * 64)) * 64

    @property
    def vocabulary(self) -> int:
        """Vocabulary size.

        Raises:
            ValueError: the recipe leaves it to a tokenizer that was not read yet.
        """
        if self.vocab_size is None:
            raise ValueError("[model] vocab_size is not known before the tokenizer is read")
        return self.vocab_size


class MixturePart(Section):
    """One part of a mixture."""

    path: Paths
    weight: Annotated[float, Field(gt=0)] = 1.0


class DataSection(Section):
    """What is read. ``path``: file, folder, glob, URL that fsspec knows, ``hf://owner/name``, a list, or a mixture."""

    path: Paths | list[MixturePart] | None = None
    tokenizer: Text | None = None  # "bytes", "bpe:4096" (trained on the data), a hub name, a folder or tokenizer.json
    format: Literal["auto", "text", "jsonl", "parquet", "hf", "bin"] = "auto"
    text_key: str = "text"  # the column or key that holds a document's text
    split: str = "train"  # of a Hugging Face dataset
    subset: str | None = None
    streaming: bool = False  # Hugging Face datasets: read without downloading the whole
    bin_dtype: Literal["uint16", "uint32"] = "uint16"  # of .bin files without a header
    document_end: str | None = None  # text files: a line that ends a document; None: a file is one document
    validation: Paths | Fraction = 0.0  # paths, or the fraction of documents held out
    isolate_documents: bool = True  # tokens see their own document only, and positions restart in each
    shuffle: bool = True
    cache: str | None = None  # folder of tokenised shards; $ATOLL_HOME/data by default
    workers: Annotated[int, Field(ge=0), _at_most(4096)] = 0  # processes that tokenise; 0: one for each core


class ObjectiveSection(Section):
    """What is minimised."""

    kind: Literal["pretrain"] = "pretrain"
    chunk_tokens: Positive = 2048  # tokens whose logits are in memory at a time, per rank


class TrainSection(Section):
    """How long, how much at a time, and where it goes."""

    steps: DurationField | None = None  # 100, "500step", "2ep", "1e9tok"
    tokens: Annotated[float, Field(gt=0, le=LONGEST)] | None = None  # the same as steps = "<tokens>tok"
    output_dir: Annotated[str, AfterValidator(_local_folder)] = "outputs/{name}"
    seed: Annotated[int, Field(ge=0), _at_most(2**63 - 1)] = 0  # the largest is what PyTorch's generators take
    seq_len: Positive = 2048
    global_batch: Positive = 8  # sequences an optimizer step
    micro_batch: Positive = 1  # sequences a rank handles at a time
    recompute: Literal["none", "full", "selective", "auto"] = "auto"  # activation checkpointing
    validate_every: DurationField | None = None
    validate_batches: Positive | None = None  # global batches a validation reads at most
    deterministic: bool = False
    hang_timeout_s: Timeout = 600.0  # a collective that takes longer is an error
    grace_s: Timeout = 30.0  # from SIGTERM to the end, the checkpoint included

    @model_validator(mode="before")
    @classmethod
    def _one_length(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("steps") is not None and values.get("tokens") is not None:
            raise ValueError("steps and tokens are both given: keep one")
        return values

    @property
    def length(self) -> Duration | None:
        """How long to train."""
        return Duration(self.tokens, "tok") if self.tokens is not None else self.steps


class OptimizerSection(Section):
    """What moves the weights. Norms, biases and embeddings never decay."""

    kind: Literal["adamw", "muon", "sgd"] = "adamw"
    lr: Annotated[float, Field(gt=0)] = 3e-4
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)
    eps: Annotated[float, Field(gt=0)] = 1e-8
    weight_decay: NonNegative = 0.1
    momentum: Fraction = 0.95  # muon and sgd
    muon_lr: Annotated[float, Field(gt=0)] = 0.02  # for the matrices; lr is AdamW's, for the rest
    moments: Literal["fp32", "bf16"] = "fp32"  # how AdamW keeps its two moments
    max_grad_norm: NonNegative = 1.0  # 0 does not clip


class ScheduleSection(Section):
    """The learning rate over the run, as a function of the step alone."""

    kind: Literal["constant", "linear", "cosine", "wsd"] = "linear"
    warmup: DurationField | None = None  # None: 2,000 steps, at most a twentieth of the run
    decay: DurationField | None = None  # wsd: the length of the last part; 10 % of the run by default
    floor: Annotated[float, Field(ge=0, le=1)] = 0.0  # of lr, where the run ends

    @model_validator(mode="after")
    def _check(self) -> ScheduleSection:
        if self.decay is not None and self.kind != "wsd":
            raise ValueError(f"decay = {self.decay} is given, and kind = {self.kind!r} has none: leave it out")
        return self


OTHER_SPELLINGS = {"dp_replicate": "replicate", "dp_shard": "shard", "tp": "tensor", "pp": "pipeline", "cp": "context"}


class ParallelSection(Section):
    """Sizes of the mesh; -1 is "the rest", on one axis at most. None leaves replicate and shard to Atoll."""

    replicate: AxisSize | None = None
    shard: AxisSize | None = None
    tensor: AxisSize = 1
    pipeline: AxisSize = 1
    context: AxisSize = 1
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"] = "1f1b"
    stages_per_rank: Positive | None = None  # of the interleaved schedules; 2 there, else 1
    reshard_after_forward: bool | None = None  # None: yes, but not inside a pipeline
    sequence_parallel: bool = True  # norms and residuals split along the sequence over the tensor ranks

    @model_validator(mode="before")
    @classmethod
    def _other_spellings(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        known: dict[str, Any] = {}
        for key, value in values.items():
            axis = str(OTHER_SPELLINGS.get(key, key))
            if axis in known:
                raise ValueError(f"{axis} is given twice, once under another spelling")
            known[axis] = value
        return known

    @model_validator(mode="after")
    def _check(self) -> ParallelSection:
        sizes = {name: getattr(self, name) for name in ("replicate", "shard", "tensor", "pipeline", "context")}
        for name, size in sizes.items():
            if size == 0:
                raise ValueError(f"{name} = 0: expected 1 or more, or -1 for the rest")
        if sum(size == -1 for size in sizes.values()) > 1:
            raise ValueError(
                "-1 (the rest) stands on more than one axis: "
                + ", ".join(f"{n} = {s}" for n, s in sizes.items() if s == -1)
            )
        return self


class PrecisionSection(Section):
    """Number formats. Master weights and moments are fp32 under bf16."""

    compute: Literal["auto", "bf16", "fp32", "fp64"] = "auto"  # auto: bf16 on a GPU, fp32 on CPU
    reduce: Literal["fp32", "bf16"] = "fp32"  # gradients, over the ranks (fp64 under compute = fp64)
    float8: Literal["none", "tensorwise", "rowwise"] = "none"
    float8_skip: list[str] = ["head"]  # modules whose names contain one of these stay in bf16
    float8_emulate: bool = False  # for tests on cards without float8


class CompileSection(Section):
    """``torch.compile``, block by block."""

    enabled: bool | None = None  # None: on a GPU yes, on CPU no
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"


class CheckpointSection(Section):
    """What is saved, when, and where."""

    every: DurationField | None = None  # None: at the end only
    keep: Annotated[int, Field(ge=1), _at_most(10**6)] = 2  # newest ones
    keep_every: DurationField | None = None  # these stay for good
    keep_best: bool = False  # the one with the lowest validation loss stays too
    path: str | None = None  # folder or fsspec URL; <output_dir>/checkpoints by default
    asynchronous: bool = True  # train on while the files are written
    at_end: bool = True


class ProfileSection(Section):
    """A ``torch.profiler`` trace of a few steps."""

    start: Positive = 10
    steps: Positive = 3


class MetricsSection(Section):
    """What is shown and where it goes; metrics.jsonl is always written."""

    trackers: list[Literal["tensorboard", "wandb", "mlflow"]] = []
    project: str = "atoll"
    plot: bool = True  # loss.png in output_dir
    sample_prompt: str | None = None  # text that the trained model goes on with, at the end
    sample_tokens: Positive = 120
    profile: ProfileSection | None = None
    notify: str | None = None  # a command, or an http(s) URL that gets a JSON summary when the run ends


class Recipe(Section):
    """Model × data × objective × parallelism × precision."""

    version: Literal[1] = 1
    name: Annotated[str, AfterValidator(_file_name)] = "run"
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    objective: ObjectiveSection = ObjectiveSection()
    train: TrainSection = TrainSection()
    optimizer: OptimizerSection = OptimizerSection()
    schedule: ScheduleSection = ScheduleSection()
    parallel: ParallelSection = ParallelSection()
    precision: PrecisionSection = PrecisionSection()
    compile: CompileSection = CompileSection()
    checkpoint: CheckpointSection = CheckpointSection()
    metrics: MetricsSection = MetricsSection()
