"""Hugging Face Transformers: the `Trainer` over all ranks.

Without --hub nothing is downloaded: a tiny DistilBERT with random weights stands in for `distilbert-base-uncased`, and
paragraphs of two novels, to be told apart, for `imdb`. Checkpoints go to ./results, as in the guide.
"""

import torch
from stand_ins import paragraphs
from where import accelerator, hub, provider

train_texts, train_labels = paragraphs(768)
test_texts, test_labels = paragraphs(256, skip=768)


def tiny_distilbert() -> str:
    """Make a model and a tokenizer in a folder, as `save_pretrained` would have left them, and return its path."""
    import atexit
    import shutil
    import tempfile

    from safetensors.torch import save_file
    from tokenizers import BertWordPieceTokenizer
    from transformers import DistilBertConfig, DistilBertForSequenceClassification, DistilBertTokenizerFast

    folder = tempfile.mkdtemp()
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    words = BertWordPieceTokenizer()
    words.train_from_iterator(train_texts, vocab_size=3000, show_progress=False)
    words.save_model(folder)
    tokenizer = DistilBertTokenizerFast.from_pretrained(folder, model_max_length=64)
    tokenizer.save_pretrained(folder)
    config = DistilBertConfig(
        vocab_size=len(tokenizer), max_position_embeddings=64, dim=64, hidden_dim=128, n_layers=1, n_heads=2,
        initializer_range=0.1,
    )
    config.save_pretrained(folder)
    # The model's own save_pretrained writes on rank 0 only, and every rank needs a folder here.
    weights = DistilBertForSequenceClassification(config).state_dict()
    # Nothing here was pretrained, and the Trainer's default learning rate is made for models that were: embeddings
    # that start near zero, with a LayerNorm after them, learn from its small steps.
    for name in ("word_embeddings", "position_embeddings"):
        weights[f"distilbert.embeddings.{name}.weight"] *= 0.005
    save_file(weights, f"{folder}/model.safetensors", metadata={"format": "pt"})
    return folder


def two_novels():
    """Splits and columns as `imdb` has them."""
    from datasets import Dataset, DatasetDict

    return DatasetDict(
        train=Dataset.from_dict({"text": train_texts, "label": train_labels}),
        test=Dataset.from_dict({"text": test_texts, "label": test_labels}),
    )


# >>> the guide
import atoll as sky  # changed: the name of the package

@sky.integrations.transformers(backend="nccl")
@sky.compute
def fine_tune():
    from transformers import (
        AutoModelForSequenceClassification,
        AutoTokenizer,
        Trainer,
        TrainingArguments,
    )
    from datasets import load_dataset

    # Load model and tokenizer
    checkpoint = "distilbert-base-uncased" if hub else tiny_distilbert()  # changed: a local stand-in unless --hub
    model = AutoModelForSequenceClassification.from_pretrained(
        checkpoint,  # changed: a local stand-in unless --hub
        num_labels=2,
    )
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)  # changed: a local stand-in unless --hub

    # Load and tokenize dataset
    dataset = load_dataset("imdb") if hub else two_novels()  # changed: a local stand-in unless --hub

    def tokenize(examples):
        return tokenizer(examples["text"], truncation=True, padding=True)

    tokenized = dataset.map(tokenize, batched=True)

    # Training arguments
    args = TrainingArguments(
        output_dir="./results",
        num_train_epochs=3,
        per_device_train_batch_size=16,
        fp16=torch.cuda.is_available(),  # changed: runs without CUDA too
    )

    # Trainer auto-detects distributed setup
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=tokenized["train"],
        eval_dataset=tokenized["test"],
    )

    trainer.train()
    return trainer.evaluate()


with sky.ComputePool(
    provider=provider,  # changed: from where.py
    nodes=2,
    accelerator=accelerator,  # changed: from where.py
    pip=["transformers", "datasets", "torch", "accelerate"],
) as pool:
    results = fine_tune() @ pool
# <<<

for rank, result in enumerate(results):
    # transformers 5 multiplies a classifier's loss by the number of ranks, under torchrun just so.
    print(f"rank {rank}: eval_loss {result['eval_loss']:.4f} after {result['epoch']:.0f} epochs")
