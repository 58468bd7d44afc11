"""The recipe: every section and key, with its meaning, unit and default. This file is the reference."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, HttpUrl, model_validator

from atoll.core.validation import nearest
from atoll.train import objectives
from atoll.train.models import families
from atoll.train.recipe.durations import LONGEST, Duration, DurationField

SCHEMA_VERSION = 1


def _no_truth_value(given: Any) -> Any:
    if isinstance(given, bool):
        raise ValueError(f"{str(given).lower()} is a truth value: expected a number")
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
    return text


def _reachable(target: str) -> str:
    if target.lower().startswith(("http://", "https://")):
        try:
            HttpUrl(target)
        except ValueError:  # it quotes the URL, whose path is a secret
            raise ValueError("no URL that can be reached: expected https://HOST/PATH, or a command") from None
    return target


def _one_of(names: Callable[[], list[str]], what: str) -> AfterValidator:
    def check(name: str) -> str:
        known = names()
        if name not in known:
            raise ValueError(f"{name!r} is no {what}{nearest(name, known)}; known are {', '.join(known)}")
        return name

    return AfterValidator(check)


Whole = Annotated[int, BeforeValidator(_no_truth_value)]  # pydantic takes true for 1
Number = Annotated[float, BeforeValidator(_no_truth_value)]
Positive = Annotated[Whole, Field(gt=0, le=2**31)]  # of anything that is counted here
Text = Annotated[str, Field(min_length=1)]
Paths = Text | list[Text]
Timeout = Annotated[Number, Field(gt=0, le=315_360_000)]  # seconds, at most ten years
NonNegative = Annotated[Number, Field(ge=0)]
Fraction = Annotated[Number, Field(ge=0, lt=1)]
AxisSize = Annotated[Whole, Field(ge=-1, le=2**20)]
Layers = Annotated[Whole, Field(gt=0, le=1000)]
Target = Annotated[str, AfterValidator(_reachable)]
Width = Annotated[Whole, Field(gt=0, le=2**24)]  # of a matrix


class Section(BaseModel):
    """A section: unknown keys are refused, values do not change after reading."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, arbitrary_types_allowed=True)


class RopeScaling(Section):
    """How rotary positions are stretched past the length they were trained on."""

    kind: Literal["llama3", "yarn"]  # `llama3` or `yarn`
    factor: Annotated[Number, Field(ge=1)]  # how many times longer sequences may be, 1 or more
    original_max_seq_len: Positive  # the length before stretching

    low_freq_factor: Number = 1.0  # llama3: turns at or below which a frequency is slowed by the whole factor
    high_freq_factor: Number = 4.0  # llama3: turns at or above which a frequency is unchanged

    beta_fast: Number = 32.0  # yarn: turns above which a frequency is unchanged
    beta_slow: Number = 1.0  # yarn: turns below which a frequency is slowed by the whole factor
    # yarn: factor on attention's scale; unset: 0.1 ln(`factor`) + 1
    attention_factor: Annotated[Number, Field(gt=0)] | None = None

    @model_validator(mode="after")
    def _check(self) -> RopeScaling:
        low, high = ("low_freq_factor", "high_freq_factor") if self.kind == "llama3" else ("beta_slow", "beta_fast")
        less, more = getattr(self, low), getattr(self, high)
        if not 0 < less < more:
            raise ValueError(f"{low} = {less:g} and {high} = {more:g}: expected 0 < {low} < {high}")
        return self


class ModelSection(Section):
    """Which network. Its dimensions derive from ``layers``, ``dim``, ``heads`` and ``hidden_dim``."""

    family: Annotated[str, _one_of(families.names, "model family")] = "llama"  # architecture, such as `llama`
    layers: Layers = 6  # number of blocks
    dim: Width = 256  # width of the residual stream
    heads: Width = 8  # number of query heads
    kv_heads: Width | None = None  # number of key and value heads; unset: `heads`
    head_dim: Width | None = None  # width of a head; unset: `dim / heads`
    # width of the feed-forward part; unset: 4 `dim` for gpt2, otherwise 8/3 `dim` rounded up to 64
    hidden_dim: Width | None = None
    vocab_size: Width | None = None  # unset: the tokenizer's
    max_seq_len: Positive = 2048  # the longest sequence the positions are meant for
    tied: bool = False  # the output head shares the embedding's weight
    norm_eps: Annotated[Number, Field(gt=0)] = 1e-5  # added under the root of every norm
    rope_theta: Annotated[Number, Field(gt=1)] = 10_000.0  # base of the rotary positions
    rope_scaling: RopeScaling | None = None  # a table `[model.rope_scaling]`, below
    # initial weights: `zero_residual`, `torchtitan` or `gpt2`; unset: `torchtitan` if `tied`, else `zero_residual`
    init_scheme: Literal["zero_residual", "torchtitan", "gpt2"] | None = None
    # standard deviation of the initial matrices; unset: 0.02, or `dim`^-0.5 under `zero_residual`
    init_std: Annotated[Number, Field(gt=0)] | None = None
    # weights to start from: a hub name, a folder, a `.safetensors` or `.gguf` file; unset: random weights
    init: Text | None = None
    python: str | None = None  # your own model, `"pkg.module:build"`: called with this section, returns the module

    @model_validator(mode="after")
    def _check(self) -> ModelSection:
        if self.head_dim is None and self.dim % self.heads:
            raise ValueError(f"dim = {self.dim} is not divisible by heads = {self.heads}; set head_dim")
        if self.heads % self.num_kv_heads:
            raise ValueError(f"heads = {self.heads} is not divisible by kv_heads = {self.num_kv_heads}")
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

    path: Paths  # as `[data] path`
    weight: Annotated[Number, Field(gt=0)] = 1.0  # share of the samples, relative to the other parts


class DataSection(Section):
    """What is read. ``path``: file, folder, glob, URL that fsspec knows, ``hf://owner/name``, a list, or a mixture."""

    # a file, folder, glob, URL (`s3://…`), `hf://owner/name`, a list of these, or a mixture: `[{path = "a.txt", weight
    # = 3.0}, …]`
    path: Paths | list[MixturePart] | None = None
    # `bytes` (needs no file), `bpe:4096` (trained on the data), a hub name, a folder or a `tokenizer.json`
    tokenizer: Text | None = None
    # `auto` (detected and printed), `text`, `jsonl`, `parquet`, `hf` or `bin`
    format: Literal["auto", "text", "jsonl", "parquet", "hf", "bin"] = "auto"
    text_key: str = "text"  # the column or key that holds a document's text
    split: str = "train"  # split of a Hugging Face dataset
    subset: str | None = None  # subset of a Hugging Face dataset
    streaming: bool = False  # read a Hugging Face dataset without downloading all of it
    # type of the tokens in `.bin` files without a header: `uint16` or `uint32`
    bin_dtype: Literal["uint16", "uint32"] = "uint16"
    document_end: str | None = None  # text files: a line that ends a document; unset: a file is one document
    validation: Paths | Fraction = 0.0  # validation files, or the fraction of the documents that is held out
    isolate_documents: bool = True  # tokens attend to their own document only, and positions restart in each
    shuffle: bool = True  # shuffle the samples anew in each epoch
    cache: str | None = None  # folder of the tokenised data; unset: `$ATOLL_HOME/data`
    workers: Annotated[Whole, Field(ge=0, le=4096)] = 0  # number of processes that tokenise; 0: one per core

    @property
    def paths(self) -> list[str]:
        """Every path, of all parts of a mixture."""
        given = [self.path] if isinstance(self.path, str) else self.path or []
        parts = [part if isinstance(part, str) else part.path for part in given]
        return [path for part in parts for path in ([part] if isinstance(part, str) else part)]


class ObjectiveSection(Section):
    """What is minimised."""

    # `pretrain`: the next token, averaged over all trained tokens
    kind: Annotated[str, _one_of(objectives.names, "objective")] = "pretrain"
    # your own, `"pkg.module:Class"`: called without arguments, returns an `atoll.train.objective.Objective`
    python: str | None = None
    chunk_tokens: Positive = 2048  # tokens whose logits are in memory at a time, per rank


Recompute = (
    Literal["none", "full", "selective", "auto"]
    | Annotated[int, Field(ge=1, strict=True)]  # not 1.0, which may be meant as a share
    | Annotated[float, Field(gt=0, lt=1)]
)


class TrainSection(Section):
    """How long, how much at a time, and where it goes."""

    steps: DurationField | None = None  # how long to train, a duration: `100`, `"500step"`, `"2ep"`, `"1e9tok"`
    tokens: Annotated[Number, Field(gt=0, le=LONGEST)] | None = None  # the same in tokens, instead of `steps`
    # folder of the run; `{name}` is the recipe's name
    output_dir: Annotated[Text, AfterValidator(_local_folder)] = "outputs/{name}"
    seed: Annotated[Whole, Field(ge=0, le=2**63 - 1)] = 0  # seed of the weights and of the data order
    seq_len: Positive = 2048  # tokens per sequence
    global_batch: Positive = 8  # sequences per optimizer step, over all ranks
    micro_batch: Positive = 1  # sequences per rank at a time; the rest of the batch is accumulated
    # activation checkpointing: `none`, `full`, `selective`, that in so many blocks (`8`) or so large a share of them
    # (`0.25`), or `auto`, the least that fits
    recompute: Recompute = "auto"
    validate_every: DurationField | None = None  # a duration; unset: only at the end, if there is validation data
    validate_batches: Positive | None = None  # maximum number of global batches per validation; unset: all
    deterministic: bool = False  # refuse kernels whose results vary from run to run
    hang_timeout_s: Timeout = 600.0  # seconds after which a collective is an error
    grace_s: Timeout = 30.0  # seconds from SIGTERM to the end, the checkpoint included

    @model_validator(mode="after")
    def _check(self) -> TrainSection:
        if self.steps is not None and self.tokens is not None:
            raise ValueError("steps and tokens are both given: keep one")
        return self

    @property
    def length(self) -> Duration | None:
        """How long to train."""
        return Duration(self.tokens, "tok") if self.tokens is not None else self.steps


class OptimizerSection(Section):
    """What moves the weights. Norms, biases and embeddings never decay."""

    kind: Literal["adamw", "muon", "sgd"] = "adamw"  # `adamw`, `muon` (for matrices, with AdamW for the rest) or `sgd`
    lr: Annotated[Number, Field(gt=0)] = 3e-4  # peak learning rate
    betas: tuple[Fraction, Fraction] = (0.9, 0.95)  # AdamW's betas (GPT-3, Llama 2 and 3)
    eps: Annotated[Number, Field(gt=0)] = 1e-8  # AdamW's epsilon (OLMo 2 measured it better than 1e-5)
    # per step, times the learning rate (GPT-3, Llama 2); embeddings don't decay, as in OLMo 2
    weight_decay: NonNegative = 0.1
    momentum: Fraction = 0.95  # momentum of muon and sgd
    # muon's learning rate, for the matrices (Jordan et al., 2024); `lr` is AdamW's, for the rest: 1e-3 learns faster
    # beside muon (docs/benchmarks.md)
    muon_lr: Annotated[Number, Field(gt=0)] = 0.02
    moments: Literal["fp32", "bf16"] = "fp32"  # format of AdamW's two moments: `fp32` or `bf16`
    fused: bool = True  # bf16 moments on a GPU: one kernel per tensor, several times as fast as PyTorch's operations
    max_grad_norm: NonNegative = 1.0  # gradients are scaled down to this norm (GPT-3, Llama 2); 0: never


class ScheduleSection(Section):
    """The learning rate over the run, as a function of the step, or of the tokens trained before it."""

    # `constant`, `linear`, `cosine` or `wsd` (warm up, stay, decay); linear to 0 ends lowest in long runs (Defazio et
    # al., 2023; Bergsma et al., 2025)
    kind: Literal["constant", "linear", "cosine", "wsd"] = "linear"
    # a duration; unset: 2,000 steps (Llama 2, OLMo 2), at most a twentieth of the run
    warmup: DurationField | None = None
    decay: DurationField | None = None  # wsd: the length of the last part; unset: 10 % of the run
    floor: Annotated[Number, Field(ge=0, le=1)] = 0.0  # learning rate one step after the last, as a fraction of `lr`
    # `tokens` follows the tokens trained so far: steps that have fewer, or a changed `global_batch`, don't shift it
    by: Literal["steps", "tokens"] = "steps"

    @model_validator(mode="after")
    def _check(self) -> ScheduleSection:
        if self.decay is not None and self.kind != "wsd":
            raise ValueError(f"decay = {self.decay} is given, and kind = {self.kind!r} has none: leave it out")
        return self


class ParallelSection(Section):
    """Sizes of the mesh; -1 is "the rest", on one axis at most. None leaves replicate and shard to Atoll."""

    replicate: AxisSize | None = None  # copies of the weights (DDP), also `dp_replicate`; unset: chosen by what fits
    # ranks that the weights are sharded over (FSDP), also `dp_shard`; unset: chosen by what fits
    shard: AxisSize | None = None
    tensor: AxisSize = 1  # ranks that share each matrix, also `tp`
    pipeline: AxisSize = 1  # ranks that share the layers, also `pp`
    context: AxisSize = 1  # ranks that share each sequence, also `cp`
    # `gpipe`, `1f1b`, `interleaved`, `zero_bubble` or `zbv`
    pipeline_schedule: Literal["gpipe", "1f1b", "interleaved", "zero_bubble", "zbv"] = "1f1b"
    stages_per_rank: Positive | None = None  # stages of the looped schedules; unset: 2 for those, otherwise 1
    # free gathered weights between forward and backward; unset: where they don't fit otherwise
    reshard_after_forward: bool | None = None
    sequence_parallel: bool = True  # split norms and residuals along the sequence over the tensor ranks

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

    # `auto` (bf16 on a GPU, fp32 on a CPU), `bf16`, `fp32` or `fp64`
    compute: Literal["auto", "bf16", "fp32", "fp64"] = "auto"
    # format of gradients between ranks: `fp32` or `bf16`; micro-batches are added up in fp32
    reduce: Literal["fp32", "bf16"] = "fp32"
    # `none`, `tensorwise` or `rowwise`; refused on a card without float8
    float8: Literal["none", "tensorwise", "rowwise"] = "none"
    float8_skip: list[str] = ["head"]  # modules whose names contain one of these stay in bf16
    float8_emulate: bool = False  # for tests on cards without float8


class CompileSection(Section):
    """``torch.compile``, block by block."""

    enabled: bool | None = None  # unset: yes on a GPU, no on a CPU
    # `default`, `reduce-overhead`, `max-autotune` or `max-autotune-no-cudagraphs`
    mode: Literal["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"] = "default"
    # `flex` (GPU) skips what no query sees, `sdpa` needs a dense mask for documents; `auto` takes flex for them
    attention: Literal["auto", "flex", "sdpa"] = "auto"


class CheckpointSection(Section):
    """What is saved, when, and where."""

    every: DurationField | None = None  # a duration; unset: only at the end
    keep: Annotated[Whole, Field(ge=1, le=10**6)] = 2  # how many of the newest are kept
    keep_every: DurationField | None = None  # a duration; saved in addition to `every`, and kept for good
    keep_best: bool = False  # keep the one with the lowest validation loss, too
    path: str | None = None  # a folder or a URL (`s3://…`); unset: `checkpoints` in `output_dir`
    asynchronous: bool = True  # train while the files are written
    at_end: bool = True  # save when the run ends


class ProfileSection(Section):
    """A ``torch.profiler`` trace of a few steps."""

    start: Positive = 10  # the first step
    steps: Positive = 3  # number of steps


class MetricsSection(Section):
    """What is shown and where it goes; metrics.jsonl is always written."""

    trackers: list[Literal["tensorboard", "wandb", "mlflow"]] = []  # any of `tensorboard`, `wandb` and `mlflow`
    project: str = "atoll"  # name of the project in the trackers
    plot: bool = True  # draw `loss.png` in `output_dir`
    sample_prompt: str | None = None  # text that the trained model continues at the end
    sample_tokens: Positive = 120  # maximum length of that text, in tokens
    profile: ProfileSection | None = None  # a table `[metrics.profile]`, below
    notify: Target | None = None  # a command, or an http(s) URL that gets a JSON summary when the run ends


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
