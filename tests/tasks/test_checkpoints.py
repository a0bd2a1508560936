"""Classes from a checkpoint: families that read texts in other ways, all trained by the same few lines."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from published import transformers, written, written_words
from saccade import cli, tasks
from saccade.models import load
from saccade.models.families import FAMILIES
from saccade.tasks._runs._registry import TASKS
from slowly import slow_after
from tasks.conftest import BAD, FILLING, GOOD, reviews, write_csv

LENGTH = {"vocab_size": 97, "max_position_embeddings": 64}
KINDS = {  # an encoder without a pooler, a decoder that reads the last token, an encoder-decoder
    "DistilBertModel": ("DistilBertConfig", {"dim": 24, "n_layers": 1, "n_heads": 2, "hidden_dim": 48, **LENGTH}),
    "GPT2LMHeadModel": (  # whose classifier finds the last token by another padding than the tokenizer's
        "GPT2Config",
        {"n_embd": 24, "n_layer": 1, "n_head": 2, "vocab_size": 97, "n_positions": 64, "pad_token_id": 95},
    ),
    "BartModel": (
        "BartConfig",
        {
            "d_model": 24,
            **{f"{side}_layers": 1 for side in ("encoder", "decoder")},
            **{f"{side}_attention_heads": 2 for side in ("encoder", "decoder")},
            **{f"{side}_ffn_dim": 48 for side in ("encoder", "decoder")},
            **LENGTH,
        },
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_checkpoint_learns(files, tmp_path, kind):
    """Catches calls that only BERT takes, heads that do not begin anew, and folders that do not open again."""
    config, sizes = KINDS[kind]
    written(tmp_path / "published", kind, getattr(transformers(), config)(**sizes))
    written_words(tmp_path / "published", [" ".join(GOOD + BAD + FILLING)])
    options = {"steps": 150, "rate": 3e-3, "batch": 19, "precision": "no", "patience": 99}
    run = tasks.train("classify", files / "reviews.csv", tmp_path / "run", initial=tmp_path / "published", **options)
    assert tasks.test(run, files / "unseen.csv", baseline=False).metrics["accuracy"] == 1.0
    assert load(run.folder).label_names == ["negative", "positive"]
    assert (run.folder / "vocab.txt").read_bytes() == (tmp_path / "published" / "vocab.txt").read_bytes()


@pytest.mark.parametrize(("labels", "anew"), slow_after(1, [(("negative", "positive"), False), (("aaa", "zzz"), True)]))
def test_a_run_says_whether_its_head_begins_anew(learned, files, tmp_path, capsys, labels, anew):
    data = write_csv(tmp_path / "data.csv", [(text, labels[label == "positive"]) for text, label in reviews(41, 3)])
    given = [str(data), "--from", str(learned.folder), "--out", str(tmp_path / "run"), "--steps=1", "--precision=no"]
    assert cli.main(["train", "classify", *given]) == 0
    told = capsys.readouterr().out.splitlines()[0]
    assert told.endswith(f"parameters, from {learned.folder}" + "; its head starts with random weights" * anew)


HEADS = {
    **{name: TASKS[name].head for name in ("classify", "tag", "answer", "mlm")},
    "translate": "conditional-generation",
    "image": "image-classification",
    "speech": "ctc",
    "forecast": "prediction",
    "graph": "node-classification",
}


@pytest.mark.parametrize("task", TASKS)
def test_the_page_names_the_families_that_a_task_starts_from(task):
    """Those with its head, and no others."""
    page = (Path(__file__).parents[2] / "docs" / "tasks" / "README.md").read_text()
    (row,) = (line.split("|")[4] for line in page.splitlines() if line.startswith(f"| [`{task}`]("))
    told = row.partition(", with ")[0].strip().split(", ")
    if "BERTs" in told:
        members = page.partition("BERTs are ")[2].partition(".")[0]
        told[told.index("BERTs") : told.index("BERTs") + 1] = re.split(", | and ", members)
    others = {"classify": {"wav2vec 2.0"}}.get(task, set())  # a classifier of sounds has the same name
    fitting = {family.name for family in FAMILIES if HEADS[task] in family.heads and family.name not in others}
    assert set(told) == fitting and len(told) == len(fitting)


def test_a_language_model_of_saccades_own_is_no_classifier(files, tmp_path):
    from saccade.models import DecoderLM, LanguageModel, ModelConfig, save
    from saccade.models.tokenizers.own import train_characters

    tokenizer = train_characters(["a film"])
    config = ModelConfig(tokenizer.vocabulary, width=12, layers=1, heads=2, hidden=16, context=11)
    save(LanguageModel(DecoderLM(config), tokenizer), tmp_path / "own")
    with pytest.raises(ValueError, match="head: a model of Saccade's own has only 'causal-lm'"):
        tasks.train("classify", files / "reviews.csv", tmp_path / "out", initial=tmp_path / "own")
    assert not (tmp_path / "out").exists()
