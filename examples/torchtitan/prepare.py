"""Makes what `debug.toml` trains with, out of Jane Austen's novels: a small tokenizer and a data set, nothing downloaded.

TorchTitan's own stand-ins, `tests/assets/tokenizer` and `tests/assets/c4_test`, are in its repository and not in its
wheel.
"""

import json
from pathlib import Path

from tokenizers import ByteLevelBPETokenizer

HERE = Path(__file__).resolve().parent
ASSETS = HERE / "assets"
BEGIN, END = "<|begin|>", "<|end|>"


def main() -> None:
    novels = sorted((HERE.parent / "austen/data").glob("*.txt"))
    tokenizer = ByteLevelBPETokenizer()
    # The debug model knows 2,048 tokens.
    tokenizer.train([str(novel) for novel in novels], vocab_size=1024, special_tokens=[BEGIN, END], show_progress=False)
    (ASSETS / "tokenizer").mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(ASSETS / "tokenizer/tokenizer.json"))
    (ASSETS / "tokenizer/tokenizer_config.json").write_text(json.dumps({"bos_token": BEGIN, "eos_token": END}))

    (ASSETS / "data").mkdir(exist_ok=True)
    with open(ASSETS / "data/data.json", "w") as file:
        for novel in novels:
            for chapter in novel.read_text().split("\n\n\n"):
                if chapter.strip():
                    file.write(json.dumps({"text": chapter.strip()}) + "\n")
    print(f"tokenizer and data are in {ASSETS}")


if __name__ == "__main__":
    main()
