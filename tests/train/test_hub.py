"""Downloads against a real HTTP server on loopback that speaks the hub's API."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import huggingface_hub.constants
import pytest
import torch
from torch import nn

import hub_server
import small
from atoll.core.errors import ConfigError
from atoll.train import hub
from atoll.train.data.tokenizer import load_tokenizer, train_bpe
from atoll.train.models import registry
from atoll.train.recipe.schema import ModelSection
from atoll.train.weight_source import open_weights
from atoll.train.weights import export, load_weights

NAME = "reef/tiny"
BIG = b"0123456789abcdef" * 200_000  # 3.2 MB


@pytest.fixture
def server(tmp_path: Path) -> Iterator[hub_server.Hub]:
    with hub_server.used(tmp_path / "hf") as running:
        running.repositories[NAME] = hub_server.Repository({"config.json": b"{}", "model.safetensors": BIG})
        yield running


def _until(holds: Callable[[], bool]) -> None:
    """Until it does, or for a minute."""
    deadline = time.monotonic() + 60
    while not holds() and time.monotonic() < deadline:
        time.sleep(0.01)


def fetch(name: str = NAME) -> Path:
    return hub.fetch(name, patterns=hub.WEIGHTS)


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        ("owner/name", True),
        ("owner/name@v1.0", True),
        ("HuggingFaceTB/SmolLM2-135M", True),
        ("name", False),
        ("a/b/c", False),
        ("./a", False),
        ("/tmp", False),
        ("~/models", False),
        ("folder/weights.gguf", False),
        ("folder/model.safetensors", False),
    ],
)
def test_names_of_a_hub(spec: str, expected: bool) -> None:
    assert hub.is_hub_name(spec) is expected


def test_an_existing_folder_is_no_name_of_a_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "owner" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert not hub.is_hub_name("owner/name")
    assert not hub.is_hub_name("owner/other")  # a typo of a path: nothing to ask a hub for
    assert hub.reads_as_name("owner/other")


def test_what_is_here_is_not_transferred_again(server: hub_server.Hub) -> None:
    seen: list[tuple[float, float | None]] = []
    folder = hub.fetch(NAME, patterns=hub.WEIGHTS, progress=lambda done, total: seen.append((done, total)))
    assert (folder / "model.safetensors").read_bytes() == BIG
    assert seen[-1] == (len(BIG) + 2, len(BIG) + 2)
    assert fetch() == folder
    assert sorted(server.transfers) == [f"{NAME}/config.json", f"{NAME}/model.safetensors"]


def test_only_the_wanted_files(server: hub_server.Hub) -> None:
    hub.fetch(NAME, patterns=["config.json", "generation_config.json"])
    assert server.transfers == [f"{NAME}/config.json"]


@pytest.mark.long
def test_ranks_that_ask_at_once_transfer_once(server: hub_server.Hub) -> None:
    server.hold = threading.Event()
    program = f"from atoll.train import hub\nprint(hub.fetch({NAME!r}, patterns=hub.WEIGHTS))"
    ranks = [
        subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True, env=os.environ)
        for _ in range(4)
    ]
    _until(lambda: server.asked == 4 and bool(server.transfers))  # all ask while the first transfer stands still
    server.hold.set()
    outputs = {rank.communicate(timeout=60)[0] for rank in ranks}
    assert [rank.returncode for rank in ranks] == [0] * 4
    assert len(outputs) == 1
    assert sorted(server.transfers) == [f"{NAME}/config.json", f"{NAME}/model.safetensors"]


def test_a_broken_transfer_goes_on_where_it_was(server: hub_server.Hub) -> None:
    big = BIG * 5  # the library keeps what came in pieces of 10 MiB
    server.repositories[NAME].files["model.safetensors"] = big
    server.break_after["model.safetensors"] = 12_000_000
    assert (fetch() / "model.safetensors").read_bytes() == big
    assert len(server.ranges) == 1
    assert int(server.ranges[0].removeprefix("bytes=").removesuffix("-")) >= 10_000_000


def test_a_killed_transfer_leaves_a_cache_that_works(server: hub_server.Hub) -> None:
    server.hold = threading.Event()
    program = f"from atoll.train import hub\nhub.fetch({NAME!r}, patterns=hub.WEIGHTS)"
    with subprocess.Popen([sys.executable, "-c", program], env=os.environ) as process:
        _until(lambda: bool(server.transfers))
        process.kill()
    server.hold.set()
    assert server.transfers
    assert (fetch() / "model.safetensors").read_bytes() == BIG


@pytest.mark.parametrize("token", [None, "hf_stranger"])
def test_gated_without_access(server: hub_server.Hub, token: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    server.repositories[NAME].gated = True
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    with pytest.raises(ConfigError) as caught:
        fetch()
    assert str(caught.value) == (
        f"{NAME} is gated: accept its licence at {server.url}/{NAME}, and set HF_TOKEN to a token of the account that "
        "did"
    )


def test_gated_with_the_right_token(server: hub_server.Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    server.repositories[NAME].gated = True
    server.repositories[NAME].allowed = ("hf_friend",)
    monkeypatch.setenv("HF_TOKEN", "hf_friend")
    assert (fetch() / "model.safetensors").read_bytes() == BIG


def test_the_stored_token_is_used(server: hub_server.Hub, tmp_path: Path) -> None:
    server.repositories[NAME].private = True
    server.repositories[NAME].allowed = ("hf_friend",)
    with pytest.raises(ConfigError, match=r"has no model reef/tiny, or not for this HF_TOKEN: check the spelling"):
        fetch()
    (tmp_path / "hf").mkdir(exist_ok=True)
    (tmp_path / "hf" / "token").write_text("hf_friend\n")
    assert (fetch() / "config.json").read_bytes() == b"{}"


def test_no_such_repository(server: hub_server.Hub) -> None:
    with pytest.raises(ConfigError, match=f"{server.url} has no model reef/tinny, .*check the spelling"):
        fetch("reef/tinny")


def test_no_such_revision(server: hub_server.Hub) -> None:
    with pytest.raises(ConfigError, match="reef/tiny has no revision 'v8'"):
        fetch("reef/tiny@v8")
    assert fetch(f"reef/tiny@{hub_server.COMMIT}") == fetch()


def test_no_file_of_that_kind(server: hub_server.Hub) -> None:
    server.repositories[NAME].files = {"model.onnx": b"x"}
    with pytest.raises(ConfigError, match=r"has no file like \*\.safetensors"):
        fetch()


def test_offline_uses_the_copy_and_says_where_it_looked(server: hub_server.Hub, tmp_path: Path) -> None:
    folder = fetch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
        assert fetch() == folder
        with pytest.raises(ConfigError) as caught:
            fetch("reef/other")
        assert str(caught.value) == (
            f"HF_HUB_OFFLINE is set, and reef/other is not complete in {tmp_path / 'hf' / 'hub'}: unset it once to "
            f"reach {server.url}, or give a local folder"
        )


def test_a_hub_that_does_not_answer(tmp_path: Path) -> None:
    with hub_server.used(tmp_path / "hf") as gone:
        url = gone.url
        with pytest.MonkeyPatch.context() as patch:
            for name in ("ENDPOINT", "HUGGINGFACE_CO_URL_TEMPLATE"):
                found = getattr(huggingface_hub.constants, name)
                patch.setattr(huggingface_hub.constants, name, found.replace(url, "http://127.0.0.1:9"))
            with pytest.raises(ConfigError, match=r"reef/tiny could not be .* http://127.0.0.1:9: .*again"):
                fetch()
            with pytest.raises(ConfigError, match=r"reef/mine could not be .* http://127.0.0.1:9: .*again"):
                hub.push(tmp_path, "reef/mine")


def test_a_name_that_cannot_be(server: hub_server.Hub) -> None:
    with pytest.raises(ConfigError, match="'reef/ti ny'"):
        fetch("reef/ti ny")
    with pytest.raises(ConfigError, match="has no model tiny"):
        fetch("tiny")


# ----------------------------------------------------------------------------------------------- models on a hub
TINY = ModelSection(layers=2, dim=32, heads=4, kv_heads=2, hidden_dim=48, vocab_size=300, max_seq_len=64)


def made(folder: Path, **kwargs: Any) -> tuple[nn.Module, Path]:
    torch.manual_seed(0)
    model = registry.build(TINY, device="cpu")
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    export(small.source_of(model), folder, dtype="fp32", **kwargs)
    train_bpe(["down to the sea " * 50], 300).save(folder)
    return model, folder


def test_a_model_by_its_name(server: hub_server.Hub, tmp_path: Path) -> None:
    model, folder = made(tmp_path / "model", max_shard_bytes=20_000)
    server.add("reef/llama", folder)
    assert open_weights("reef/llama").section == TINY.model_copy(update={"init_std": TINY.std})  # a config names it
    back = registry.build(TINY, device="cpu")
    assert load_weights(back, TINY, "reef/llama") == []
    assert all(torch.equal(*pair) for pair in zip(back.parameters(), model.parameters(), strict=True))
    own = load_tokenizer("reef/llama")
    assert own.encode("the sea") == load_tokenizer(str(folder)).encode("the sea")
    assert len(server.transfers) == len(set(server.transfers))  # nothing twice


# huggingface_hub itself calls its HTTP library in an old way.
@pytest.mark.filterwarnings("ignore:Use 'content=:DeprecationWarning")
def test_what_is_pushed_comes_back(server: hub_server.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, folder = made(tmp_path / "model", max_shard_bytes=20_000)
    monkeypatch.setenv("HF_TOKEN", "hf_writer")
    assert hub.push(folder, "reef/mine") == f"{server.url}/reef/mine"
    assert server.repositories["reef/mine"].files.keys() >= {path.name for path in folder.iterdir()}
    back = hub.fetch("reef/mine", patterns=["*"])
    assert all((back / path.name).read_bytes() == path.read_bytes() for path in folder.iterdir())


def test_pushing_without_leave(server: hub_server.Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    server.readers = ("hf_reader",)
    with pytest.raises(ConfigError, match=r"has no model reef/mine, or not for this HF_TOKEN: .* may write"):
        hub.push(tmp_path, "reef/mine")
    with pytest.raises(ConfigError, match="expected owner/name"):
        hub.push(tmp_path, "mine")
