"""The estimate of memory against memory that is measured, and what follows from it."""

from __future__ import annotations

import gc

import pytest
import torch

import ranks
from atoll.core.errors import ConfigError
from atoll.train.dryrun import dryrun, parse_gpus, requirements
from atoll.train.models.registry import build, parameter_count
from atoll.train.optim.build import build_optimizer
from atoll.train.parallel import recompute
from atoll.train.parallel.estimate import GIB, estimate, sizes, state_bytes
from atoll.train.parallel.layout import Layout, resolve
from atoll.train.parallel.plan import choose, device_bytes, first_fix, fits, fits_replicated
from atoll.train.recipe.schema import Recipe
from live import LiveBytes

LLAMA_8B = {"layers": 32, "dim": 4096, "heads": 32, "kv_heads": 8, "hidden_dim": 14336, "vocab_size": 128256}
SMALL = {"layers": 4, "dim": 128, "heads": 4, "kv_heads": 2, "vocab_size": 1000, "max_seq_len": 512}


def recipe(**sections):
    return Recipe.model_validate(sections)


def llama_8b(train=None, **sections):
    train = {"seq_len": 8192, "global_batch": 64, "recompute": "none", **(train or {})}
    return recipe(model=LLAMA_8B, train=train, **{"data": {"isolate_documents": False}, **sections})


# ------------------------------------------------------------------------------------------------------- measured
DTYPES = {"fp32": torch.float32, "fp64": torch.float64, "bf16": torch.bfloat16}


def measured(wanted, mode):
    """Bytes of a training step of two micro-batches on CPU, by part, and the most that lived at a time."""
    train, model = wanted.train, wanted.model
    torch.manual_seed(0)
    tokens = torch.randint(0, model.vocabulary, (train.micro_batch, train.seq_len))
    positions = torch.arange(train.seq_len).expand(train.micro_batch, -1)
    documents = (positions > 10).long() if wanted.data.isolate_documents else None
    parts = {}
    with LiveBytes() as live:
        made = build(model, device="cpu", dtype=DTYPES[wanted.precision.compute])
        with torch.no_grad():
            for parameter in made.parameters():
                parameter.normal_(std=0.02)
        made.head.chunk_tokens = wanted.objective.chunk_tokens
        recompute.checkpoint_activations(made, mode)
        parts["weights"] = live.now
        optimizer = build_optimizer(dict(made.named_parameters()), wanted.optimizer)
        parts["optimizer"] = live.now - parts["weights"]
        for _ in range(2):
            before = live.now
            loss = made(tokens, positions, documents, tokens)
            # The loss keeps the gradient of the head's weight, which is another part of the estimate.
            kept = model.vocabulary * model.dim * max(4, DTYPES[wanted.precision.compute].itemsize)
            parts["activations"] = live.now - before - kept
            loss.sum().backward()
            del loss
        parts["gradients"] = sum(parameter.grad.nbytes for parameter in made.parameters())
        optimizer.step()
    return parts, live.peak


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize("documents", [False, True])
@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2"])
def test_parts_and_peak_are_as_measured(family, documents, mode):
    wanted = recipe(
        model={**SMALL, "family": family},
        data={"isolate_documents": documents},
        objective={"chunk_tokens": 128},
        train={"seq_len": 128, "global_batch": 4, "micro_batch": 2},
        precision={"compute": "fp32"},
    )
    parts, peak = measured(wanted, mode)
    told = estimate(wanted, Layout(), recompute=mode, device="cpu")
    for part, size in parts.items():
        assert told.parts[part] == pytest.approx(size, rel=0.05), part
    assert told.total - told.parts["reserve"] == pytest.approx(peak, rel=0.15)


@pytest.mark.parametrize(
    "sections",
    [
        {"precision": {"compute": "fp64"}},
        {"precision": {"compute": "fp32"}, "model": {**SMALL, "tied": True}},
        {"precision": {"compute": "fp32"}, "optimizer": {"kind": "muon"}},
        {"precision": {"compute": "fp32"}, "optimizer": {"kind": "sgd"}},
        {"precision": {"compute": "fp32"}, "optimizer": {"moments": "bf16"}},
    ],
    ids=["fp64", "tied", "muon", "sgd", "bf16 moments"],
)
def test_other_formats_and_optimizers_are_as_measured(sections):
    wanted = recipe(**{"model": SMALL, "train": {"seq_len": 128, "global_batch": 4, "micro_batch": 2}, **sections})
    parts, peak = measured(wanted, "none")
    told = estimate(wanted, Layout(), recompute="none", device="cpu")
    for part, size in parts.items():
        assert told.parts[part] == pytest.approx(size, rel=0.05), part
    assert told.total - told.parts["reserve"] == pytest.approx(peak, rel=0.15)


def test_activations_in_bf16_are_as_measured():
    for mode in ("none", "selective", "full"):
        wanted = recipe(model=SMALL, train={"seq_len": 128, "global_batch": 4}, precision={"compute": "bf16"})
        told = estimate(wanted, Layout(), recompute=mode, device="cpu")
        assert told.parts["activations"] == pytest.approx(measured(wanted, mode)[0]["activations"], rel=0.05)


@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch hides its own, which errors would forestall
@pytest.mark.parametrize("family", ["llama", "olmo2"])
@pytest.mark.long
def test_activations_of_compiled_blocks_are_as_measured(mode, family):
    wanted = recipe(
        model={**SMALL, "family": family},
        data={"isolate_documents": False},
        train={"seq_len": 128, "global_batch": 2, "micro_batch": 2},
        precision={"compute": "fp32"},
        compile={"enabled": True},
    )
    torch._dynamo.reset()
    made = build(wanted.model, device="cpu")
    recompute.checkpoint_activations(made, mode)
    for block in made.blocks.values():
        block.compile(backend="aot_eager_decomp_partition")  # cuts forward from backward as the default backend does
    known = {parameter.untyped_storage().data_ptr() for parameter in made.parameters()}
    tokens = torch.zeros(2, 128, dtype=torch.int64)
    saved = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in known:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        made(tokens, torch.arange(128).expand(2, -1), None, tokens)
    torch._dynamo.reset()
    told = estimate(wanted, Layout(), recompute=mode, device="cpu")
    head = wanted.model.vocabulary * wanted.model.dim * 4
    assert told.parts["activations"] == pytest.approx(sum(saved.values()) - head, rel=0.08)


def shares(wanted, layout):
    """Bytes of this rank's weights and optimizer states."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from atoll.train.optim.optimizer import local
    from atoll.train.parallel.tensor import apply_tensor

    made = build(wanted.model, device="cpu")
    sizes_of_axes = (layout.shard, layout.tensor)
    mesh = init_device_mesh("cpu", sizes_of_axes, mesh_dim_names=("shard", "tensor"))
    if layout.tensor > 1:
        apply_tensor(made, mesh["tensor"], sequence_parallel=True)
    if layout.shard > 1:
        for block in made.blocks.values():
            fully_shard(block, mesh=mesh["shard"])
        fully_shard(made, mesh=mesh["shard"])
    optimizer = build_optimizer(dict(made.named_parameters()), wanted.optimizer)
    with torch.no_grad():
        weights = sum(local(parameter).nbytes for parameter in made.parameters())
        states = sum(local(each).nbytes for state in optimizer.state.values() for each in state.values())
    return weights, states


@pytest.mark.parametrize("layout", [Layout(shard=2), Layout(tensor=2), Layout(shard=2, tensor=2)], ids=str)
@pytest.mark.long
def test_a_ranks_share_of_the_weights_is_as_measured(layout):
    wanted = recipe(model=SMALL, train={"seq_len": 128}, precision={"compute": "fp32"})
    told = estimate(wanted, layout, recompute="none", device="cpu")
    for weights, states in ranks.run(layout.world_size, shares, wanted, layout):
        assert told.parts["weights"] == pytest.approx(weights, rel=0.02)
        assert told.parts["optimizer"] == pytest.approx(states, rel=0.02)


# -------------------------------------------------------------------------------------------------------- by hand
def test_sizes_add_up_to_the_model():
    for family in ("llama", "qwen3", "phi3", "gpt2"):
        model = recipe(model={**SMALL, "family": family}).model
        assert sizes(model).whole == parameter_count(model)
        assert len(sizes(model).blocks) == 4


def test_a_users_model_is_counted_layer_by_layer(tmp_path, monkeypatch):
    (tmp_path / "their_model.py").write_text(
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def __init__(self, config):\n"
        "        super().__init__()\n"
        "        self.wte = torch.nn.Embedding(config.vocab_size, 8)\n"
        "        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(3))\n"
        "    def forward(self, tokens):\n"
        "        x = self.wte(tokens)\n"
        "        for layer in self.layers: x = layer(x)\n"
        "        return x @ self.wte.weight.t()\n"
        "def build(config): return Model(config)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    model = recipe(model={"python": "their_model:build", "vocab_size": 10}).model
    assert sizes(model).blocks == ((64, 8),) * 3
    assert sizes(model).whole == 10 * 8 + 3 * 72
    odd = recipe(model={"python": "their_model:build", "vocab_size": 10, "dim": 24})  # heads of 3, if it has heads
    assert estimate(odd, Layout(), recompute="none").parts["activations"] > 0


def test_replicas_in_bf16_hold_masters_and_copies():
    told = estimate(llama_8b(), Layout(replicate=8), recompute="full").parts
    count = parameter_count(llama_8b().model)
    assert told["weights"] == 4 * count
    assert told["gathered"] == 2 * count
    assert told["optimizer"] == 8 * count
    assert told["gradients"] == pytest.approx(4 * count, rel=0.01)
    assert state_bytes(llama_8b()) == (4 * count, 8 * count)


def test_sharding_divides_weights_and_states_also_by_context():
    count = parameter_count(llama_8b().model)
    for layout in (Layout(shard=8), Layout(shard=4, context=2), Layout(replicate=2, shard=8)):
        told = estimate(llama_8b(), layout, recompute="full").parts
        assert told["weights"] == 4 * count // 8
        assert told["optimizer"] == count
        assert told["gathered"] < 0.15 * 2 * count


@pytest.mark.parametrize("tied", [True, False])
def test_what_stays_gathered_is_the_whole_model_with_its_embedding(tied):
    whole = recipe(model={**SMALL, "tied": tied}, parallel={"reshard_after_forward": False})
    told = estimate(whole, Layout(shard=8), recompute="none").parts
    assert told["gathered"] == 2 * sizes(whole.model).whole


def test_activations_are_split_over_tensor_and_context_ranks():
    def kept(mode="full", **axes):
        return estimate(llama_8b(), Layout(**axes), recompute=mode).parts["activations"]

    assert kept(tensor=4) < 0.4 * kept()
    assert kept(context=4) == pytest.approx(kept() / 4, rel=0.01)
    assert kept("none", tensor=8) < 0.3 * kept("none")
    # Keys and values are gathered for each context rank.
    assert kept("none") / 4 < kept("none", context=4) < kept("none") / 2


@pytest.mark.parametrize(
    ("schedule", "in_flight"), [("gpipe", 64), ("1f1b", 4), ("zbv", 4), ("interleaved", 5.5), ("zero_bubble", 5.5)]
)
def test_a_pipeline_keeps_micro_batches_in_flight(schedule, in_flight):
    wanted = llama_8b(parallel={"pipeline_schedule": schedule, "pipeline": 4})
    one = estimate(llama_8b(), Layout(), recompute="none").parts["activations"]
    told = estimate(wanted, Layout(pipeline=4), recompute="none").parts["activations"]
    assert told == pytest.approx(one / 4 * in_flight, rel=0.25)


def test_gpipe_keeps_the_gradient_of_the_head_for_every_micro_batch():
    def loss(schedule):
        wanted = llama_8b(train={"global_batch": 256}, parallel={"pipeline_schedule": schedule, "pipeline": 4})
        return estimate(wanted, Layout(pipeline=4), recompute="full").parts["head and loss"]

    assert loss("gpipe") > 200 * 4 * 128256 * 4096
    assert loss("1f1b") == 0  # the first rank is the fullest


def test_parts_add_up_and_are_described():
    told = estimate(llama_8b(), Layout(shard=8), recompute="selective")
    assert told.total == sum(told.parts.values())
    assert told.fits(told.total)
    assert not told.fits(told.total - 1)
    lines = told.describe()
    assert len(lines) == sum(size > 0 for size in told.parts.values()) + 1
    assert lines[-1].split() == ["total", f"{told.total / GIB:.2f}", "GiB"]
    assert "1/8 of the model per rank" in lines[0]


# ------------------------------------------------------------------------------------------------------- what fits
H100 = parse_gpus("H100")[2]


def test_auto_takes_the_least_recompute_that_fits():
    wanted = llama_8b(train={"recompute": "auto"})
    layout = Layout(shard=8)
    needs = {mode: estimate(wanted, layout, recompute=mode).total for mode in ("none", "selective", "full")}
    assert needs["full"] < needs["selective"] < needs["none"]
    for mode, size in needs.items():
        assert choose(wanted, layout, size) == mode
    assert choose(wanted, layout, 1) == "full"
    assert choose(llama_8b(), layout, 1) == "none"  # what was asked for
    for blocks in (1, 10, 31):  # of 32, the smallest number that fits
        size = estimate(wanted, layout, recompute=blocks / 32).total
        assert needs["selective"] < size < needs["none"]
        assert choose(wanted, layout, size) == choose(llama_8b(train={"recompute": blocks}), layout, 1) == blocks / 32
    assert choose(llama_8b(train={"recompute": 0.25}), layout, 1) == 0.25
    with pytest.raises(ConfigError, match="the model has 32 blocks"):
        choose(llama_8b(train={"recompute": 33}), layout, 1)


def test_small_models_are_replicated_and_large_ones_sharded():
    small = recipe(model={**SMALL, "layers": 12, "dim": 768, "heads": 12, "kv_heads": 12})
    assert fits_replicated(small, 8, H100)
    assert not fits_replicated(llama_8b(train={"recompute": "auto"}), 8, H100)
    assert fits_replicated(llama_8b(), 1, H100)  # there is nothing to choose
    assert fits_replicated(llama_8b(parallel={"shard": 8}), 8, H100)


def test_replicas_do_not_pay_with_more_recompute():
    wanted = recipe(
        model={**LLAMA_8B, "layers": 4, "vocab_size": 32000},
        train={"seq_len": 8192, "micro_batch": 8, "global_batch": 64},
        data={"isolate_documents": False},
    )
    limit = estimate(wanted, Layout(replicate=8), recompute="selective").total
    assert choose(wanted, Layout(replicate=8), limit) == "selective"
    assert choose(wanted, Layout(shard=8), limit) == "none"
    assert not fits_replicated(wanted, 8, limit)


def fix(wanted, layout, limit):
    """The fix, after looking that it helps where it is flags alone."""
    flags = first_fix(wanted, layout, limit)
    if flags is None or " on " in flags:
        return flags
    words = flags.split()
    tree = wanted.model_dump(mode="json", exclude_none=True)
    for key, value in zip(words[::2], words[1::2], strict=True):
        section, name = key.removeprefix("--").split(".")
        tree[section][name] = int(value) if value.isdecimal() else value
    changed = Recipe.model_validate(tree)
    if "--parallel" not in flags:  # the layout stays
        assert fits(changed, layout, limit)
    else:
        tree["parallel"]["replicate"] = 1
        changed = Recipe.model_validate(tree)
        assert fits(changed, resolve(changed, layout.world_size), limit)
    return flags


def test_the_first_fix_is_the_cheapest_that_helps():
    wanted, layout = llama_8b(), Layout(shard=8)
    assert fix(wanted, layout, H100) is None
    assert fix(wanted, layout, 50 * GIB) == "--train.recompute selective"
    assert fix(wanted, layout, 30 * GIB) == "--train.recompute full"
    larger = llama_8b(train={"micro_batch": 4, "recompute": "auto", "global_batch": 128})
    assert fix(larger, layout, 30 * GIB) == "--train.micro_batch 2"
    automatic = llama_8b(train={"recompute": "auto"})
    assert fix(automatic, Layout(replicate=8), 50 * GIB) == "--parallel.shard 8"
    assert fix(automatic, layout, 25 * GIB) == "--optimizer.moments bf16"
    assert fix(automatic, layout, 22 * GIB) == "--parallel.tensor 2 --parallel.shard 4"


def test_several_changes_are_named_together():
    found = fix(llama_8b(), Layout(shard=8), 25 * GIB)
    assert found == "--train.recompute full --optimizer.moments bf16"


def test_more_ranks_are_the_last_resort():
    found = fix(llama_8b(train={"recompute": "auto"}), Layout(shard=2), 40 * GIB)
    assert found == "--parallel.shard 8 on 8 ranks instead of 2"
    assert fix(llama_8b(), Layout(), GIB) is None


def test_cards_by_name():
    assert parse_gpus("H100:8")[:2] == ("H100", 8)
    assert parse_gpus("rtx4090") == ("RTX4090", 1, int(23.5 * GIB))
    assert parse_gpus("A100-80GB:4")[2] > 1.9 * parse_gpus("A100:4")[2]
    with pytest.raises(ConfigError, match=r"'H10' is not a card whose memory is known: did you mean 'H100'\?"):
        parse_gpus("H10:2")
    with pytest.raises(ConfigError, match="expected for instance 'H100:8'"):
        parse_gpus("H100:x")


def test_ranks_share_this_machines_memory():
    whole = device_bytes(torch.device("cpu"), 1)
    assert whole > GIB
    assert device_bytes(torch.device("cpu"), 4) == whole // 4


# --------------------------------------------------------------------------------------------------------- dry run
def test_a_dry_run_tells_what_a_run_would_take():
    wanted = llama_8b(train={"tokens": 1e12, "recompute": "auto"})
    text = "\n".join(requirements(wanted, 16, 8, H100, "H100").lines)
    assert "8.03 B parameters" in text
    assert "16 ranks on 2 nodes, each H100 with 79.1 GiB" in text
    assert "layout: FSDP 16" in text
    assert "recompute: none (chosen: the least that fits)" in text
    assert "steps: 1,907,349; 64 sequences × 8,192 = 524,288 tokens per step" in text
    assert "tokens: 1.00 T\n" in text
    assert "checkpoint: 89.7 GiB = weights 29.9 GiB + optimizer 59.8 GiB; 2 kept" in text
    assert "fits: " in text


def test_a_dry_run_of_what_does_not_fit_names_the_fix():
    text = "\n".join(requirements(llama_8b(train={"steps": "2ep"}), 8, 8, 50 * GIB, "A100").lines)
    assert "does not fit: " in text
    assert "first change that would make it fit: --train.recompute selective" in text
    assert "steps: 2ep, known when the data has been read" in text
    lost = "\n".join(requirements(llama_8b(), 1, 1, GIB, "L4").lines)
    assert "no single change would make it fit" in lost
    assert "steps: not given, set --train.steps" in lost


def test_a_dry_run_refuses_what_cannot_be_split():
    with pytest.raises(ConfigError, match="global_batch = 64 is not divisible by 128 data ranks"):
        requirements(llama_8b(), 128, 8, H100, "H100")


def test_a_dry_run_by_the_name_of_a_card():
    wanted = llama_8b(train={"steps": 10, "recompute": "auto"})
    text = dryrun(wanted, nodes=2, gpus="H100:8")
    assert text == requirements(wanted, 16, 8, H100, "H100")
    assert "4 ranks on 2 nodes, each H100" in "\n".join(dryrun(wanted, nodes=2, nproc=2, gpus="H100:8").lines)


def test_a_dry_run_tells_of_data_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.txt").write_text("a")
    listed = ["a.txt", "*.txt", "hf://a/b", "no/*.jsonl"]
    for path in ("no/*.jsonl", listed, [{"path": "no/*.jsonl"}, {"path": ["a.txt"]}]):
        found = dryrun(llama_8b(data={"path": path}), gpus="H100:8")
        assert [line for line in found.lines if line.startswith("data")] == ["data: no/*.jsonl matches no file here"]
        assert (found.facts["missing_data"], found.ok) == (["no/*.jsonl"], False)


def test_a_dry_run_on_this_machine_takes_the_vocabulary_of_the_tokenizer():
    for tokenizer, rows in (("bytes", 260), ("bpe:4096", 4096)):
        wanted = recipe(
            model={**SMALL, "vocab_size": None}, data={"tokenizer": tokenizer}, precision={"compute": "fp32"}
        )
        known = parameter_count(recipe(model={**SMALL, "vocab_size": rows}).model)
        text = "\n".join(dryrun(wanted, nproc=2, gpus="L4").lines)
        assert f"weights{4 * known / 2**20:16.2f} MiB" in text
        assert "2 ranks on 1 node" in text
    with pytest.raises(ConfigError, match="vocab_size is not set, and there is no tokenizer"):
        dryrun(recipe(model={**SMALL, "vocab_size": None}))


def test_a_dry_run_without_a_card_counts_this_machine():
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "a share of this machine"
    assert f"2 ranks on 1 node, each {name} with" in "\n".join(dryrun(recipe(model=SMALL), nproc=2).lines)
    assert "1 rank on 1 node" in "\n".join(dryrun(recipe(model=SMALL), nproc=1).lines)


# ------------------------------------------------------------------------------------------------------------ GPU
@pytest.fixture
def compiled_by_threads():
    """Processes that compile would be left behind."""
    import torch._inductor.config

    with torch._inductor.config.patch(compile_threads=1):
        yield


@pytest.mark.gpu
@pytest.mark.long
@pytest.mark.usefixtures("cuda_in_process", "compiled_by_threads")
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("mode", ["none", "selective", "full"])
@pytest.mark.parametrize(
    ("model", "train"),
    [
        (
            {"layers": 12, "dim": 768, "heads": 12, "kv_heads": 4, "vocab_size": 32000},
            {"seq_len": 2048, "micro_batch": 8, "global_batch": 16},
        ),
        (
            {"layers": 16, "dim": 2048, "heads": 32, "kv_heads": 8, "hidden_dim": 8192, "vocab_size": 128256},
            {"seq_len": 4096, "micro_batch": 2, "global_batch": 4},
        ),
    ],
    ids=["100M", "1B"],
)
@pytest.mark.filterwarnings("ignore::UserWarning")  # torch hides its own, which errors would forestall
def test_on_a_gpu_the_peak_is_as_measured(model, train, mode, compiled):
    from atoll.train.parallel.gradients import ReplicatedWeights
    from atoll.train.parallel.precision import NumberFormats

    wanted = recipe(model=model, train=train, data={"isolate_documents": False}, compile={"enabled": compiled})
    torch._dynamo.reset()
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    made = build(wanted.model, device="cuda", dtype=torch.float32)
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_(std=0.02)
    made.head.chunk_tokens = wanted.objective.chunk_tokens
    recompute.checkpoint_activations(made, mode)
    if compiled:
        for block in made.blocks.values():
            block.compile()
    formats = NumberFormats(torch.bfloat16, torch.float32, torch.float32)
    weights = ReplicatedWeights([made], formats, group=None, overlap=True)
    optimizer = build_optimizer(weights.masters, wanted.optimizer)
    tokens = torch.randint(0, wanted.model.vocabulary, (train["micro_batch"], train["seq_len"]), device="cuda")
    positions = torch.arange(train["seq_len"], device="cuda").expand(train["micro_batch"], -1)
    for _ in range(2):
        weights.begin()
        for _ in range(2):
            weights.last_micro_batch()
            made(tokens, positions, None, tokens).sum().backward()
        weights.finish()
        optimizer.step()
        weights.publish()
    peak = torch.cuda.max_memory_allocated() - before
    told = estimate(wanted, Layout(), recompute=mode)
    print(f"measured {peak / GIB:.2f} GiB", *told.describe(), sep="\n")
    # The compiler keeps less of a block for the backward pass than the trace of the block does.
    assert 0.93 * peak < told.total - told.parts["reserve"] < 1.2 * peak
