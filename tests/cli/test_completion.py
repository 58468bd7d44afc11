"""What a shell offers after Tab, and that it comes soon."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from atoll.cli.app import app
from atoll.cli.completion import words_after
from atoll.core.paths import atoll_home
from atoll.train.recipe import keys

ROOT = Path(__file__).parents[2]


def after(*words: str) -> list[str]:
    return words_after(typer.main.get_command(app), list(words))


def test_commands_flags_and_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.toml").touch()
    (atoll_home() / "clusters" / "lab-1").mkdir(parents=True)
    (atoll_home() / "clusters" / "lab-1" / "cluster.json").write_text("{}")
    (atoll_home() / "config.toml").write_text('[ssh.gpu]\nhosts = ["a"]\n')
    assert after("la") == ["launch"]
    assert "serve" not in after("")
    assert after("jobs", "") == ["cancel", "launch", "logs", "queue"]
    assert after("recipes", "") == ["cp", "ls", "show"]
    assert "--no-resume" in after("train", "llama3_8b", "--no")
    assert after("launch", "-c", "") == ["lab-1"] == after("logs", "") == after("down", "lab")
    assert after("launch", "--infra", "") == ["local", "ssh/gpu"] == after("check", "")
    assert after("status", "-o", "") == ["json", "table"]
    assert after("train", "m") == ["mine.toml"]
    assert "llama3_debug" in after("recipes", "show", "llama3_d")
    assert after("run", "") == []  # a file, which the shell completes


def test_every_key_of_a_recipe_is_a_flag() -> None:
    known = [f"--{section}.{key}" for section, model in keys.sections().items() for key in model.model_fields]
    assert [each for each in after("train", "x", "--") if "." in each] == sorted(known)


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_its_script(shell: str) -> None:
    done = CliRunner().invoke(app, ["completion", shell])
    assert done.exit_code == 0
    assert "atoll completion words" in done.stdout


def test_bash_completes() -> None:
    script = f'PATH={Path(sys.executable).parent}:$PATH; eval "$(atoll completion bash)"\n'
    script += 'COMP_WORDS=(atoll recipes s); COMP_CWORD=2; _atoll; echo "${COMPREPLY[@]}"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("show\n", "")


def test_what_is_slow_is_not_imported() -> None:
    code = (
        "import sys; sys.argv = ['atoll', 'completion', 'words', 'train', 'x', '--train.']\n"
        "from atoll.cli.main import main\n"
        "try: main()\nexcept SystemExit: pass\n"
        "print({'torch', 'rich.console', 'numpy', 'atoll.train.recipe.schema'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert "--train.steps" in done.stdout
    assert done.stderr == "set()\n"
