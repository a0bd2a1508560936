"""A student and its teacher: what is minimised, what the student begins with, and what does not fit."""

from __future__ import annotations

import dataclasses
import json

import pytest
import torch
import torch.nn.functional as F
import typer.main

from saccade import cli, tasks
from saccade.cli import _app
from saccade.models import load
from saccade.operator._observers import padding_in_place
from saccade.tasks._compression._distill import distill_request
from saccade.tasks._compression._distillation import Teaching
from saccade.tasks._compression._soft_losses import relation_distance, softened_divergence
from saccade.tasks._runs._prepared import PreparedTaskRun
from saccade.tasks._runs._request import read_data
from saccade.tasks._runs._run_folder import TaskFile
from tasks.conftest import SMALL, reviews, write_csv
from tasks.test_kills import survives_kills
from training.test_killing import server

__all__ = ["server"]  # a fixture
FEW = {"steps": 6, "batch": 19, "precision": "no", "rate": 6e-3, "every": 3, "tensorboard": False}


@pytest.fixture(scope="module")
def deep(files, tmp_path_factory):
    """A teacher of five blocks, with weights of classes."""
    out = tmp_path_factory.mktemp("deep") / "run"
    return tasks.train(
        "classify", files / "reviews.csv", out, **{**SMALL, "layers": 5, "steps": 3, "class_weights": True}
    )


@pytest.fixture
def objective(files, tmp_path):
    def make(teacher, student, **options):
        given = {**FEW, **options}
        run = distill_request(teacher, student, files / "reviews.csv", tmp_path / "out", given)
        return PreparedTaskRun.of(run, None).objective

    return make


# --- the loss ---------------------------------------------------------------------------------------------------------


def test_the_gradient_is_that_of_the_formula():
    """d/ds T² KL(p || q) = T (q - p): without the factor it would shrink with T²."""
    generator = torch.Generator().manual_seed(3)
    student, teacher = (torch.randn(5, 7, dtype=torch.float64, generator=generator) * 4 for _ in range(2))
    student.requires_grad_()
    softened_divergence(student, teacher, 3.0).mean().backward()
    expected = 3.0 * ((student / 3).softmax(-1) - (teacher / 3).softmax(-1)) / 5
    torch.testing.assert_close(student.grad, expected, rtol=1e-12, atol=1e-14)


def test_what_cannot_be_costs_nothing():
    """Of answers the padding has a logit of -inf, whose product with a probability of 0 must not be NaN."""
    student, teacher = torch.randn(3, 5), torch.randn(3, 5)
    both = [torch.cat([logits, torch.full((3, 2), -torch.inf)], 1).requires_grad_() for logits in (student, teacher)]
    found = softened_divergence(*both, 2.0)
    torch.testing.assert_close(found, softened_divergence(student, teacher, 2.0))
    found.sum().backward()
    assert both[0].grad.isfinite().all() and (both[0].grad[:, 5:] == 0).all()


@pytest.mark.slow
def test_with_no_weight_it_is_plain_training(learned, deep, files, tmp_path):
    """Bit for bit: teacher and student draw nothing, and nothing of the batches or looks is another."""
    plain = tasks.train("classify", files / "reviews.csv", tmp_path / "plain", initial=deep.folder, **FEW)
    taught = {"weight": 0.0, "temperature": 1.0, **FEW}
    run = tasks.distill(learned, deep.folder, files / "reviews.csv", tmp_path / "taught", **taught)
    for name in ("model.safetensors", "last.safetensors"):
        assert (run.folder / name).read_bytes() == (plain.folder / name).read_bytes()
    changed = {**taught, "weight": 0.5, "resume": True}
    with pytest.raises(ValueError, match=r"is of another run: weight 0.5 \(asked for\) / 0.0 \(in the checkpoint\)$"):
        tasks.distill(learned, deep.folder, files / "reviews.csv", tmp_path / "taught", **changed)


def test_truth_and_teacher_by_their_weights(objective, deep, learned):
    made = objective(learned, deep.folder, weight=0.3, temperature=4.0)
    batch = made.batch(1)
    with torch.no_grad():
        ours, theirs = (model.eval()(batch["input_ids"], batch["attention_mask"]).logits for model in (
            made.model, load(learned.folder)))  # fmt: skip
    divergence = F.kl_div((ours / 4).log_softmax(-1), (theirs / 4).log_softmax(-1), log_target=True, reduction="sum")
    expected = 0.7 * F.cross_entropy(ours, batch["labels"]) + 0.3 * 16 * divergence / 19
    torch.testing.assert_close(made.loss(made.model, batch), expected)


def test_a_student_that_is_its_teacher_has_nothing_to_learn(objective, deep):
    made = objective(deep, "layers=5", weight=1.0, hidden=1.0, relations=1.0)
    made.model.eval()
    with torch.no_grad():
        assert abs(float(made.loss(made.model, made.batch(0)))) < 1e-6
        made.model.encoder.blocks[4].attention.projection.weight.mul_(9)
        assert float(made.loss(made.model, made.batch(0))) > 1e-3


@pytest.mark.parametrize("student", ["layers=2", "layers=2,width=18,heads=3"])
def test_parts_of_a_batch_add_up_to_the_whole(objective, deep, student):
    """By classes that weigh unequally, and tokens, of which parts have unequally many."""
    made = objective(deep, student, hidden=0.7, relations=0.4)
    made.model.eval()
    batch = made.batch(2)
    whole = made.loss(made.model, batch)
    parts = made.split(batch, 4)
    assert len({int(part["attention_mask"].sum()) for part in parts}) > 1
    joined = sum(made.weight(part) / made.weight(batch) * made.loss(made.model, part) for part in parts)
    torch.testing.assert_close(joined, whole)


# --- relations, by transformers ---------------------------------------------------------------------------------------


def split(features, heads):
    return features.unflatten(-1, (heads, -1)).transpose(1, 2)


def tiny_bert(folder, width, heads):
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": width, "num_attention_heads": heads, "intermediate_size": 23, "vocab_size": 61}
    config = transformers.BertConfig(**sizes, num_hidden_layers=2, attn_implementation="eager", initializer_range=0.5)
    theirs = transformers.BertModel(config).eval()
    theirs.save_pretrained(folder)
    return theirs


@pytest.mark.parametrize("student_heads", [2, 3])
def test_relations_are_those_of_transformers_attentions(tmp_path, student_heads):
    """MiniLM's formula, written out on attentions, queries, keys and values of transformers' model."""
    torch.manual_seed(5)
    ids, mask = torch.randint(0, 61, (3, 7)), (torch.arange(7) < torch.tensor([5, 7, 2])[:, None]).long()
    sizes = {"teacher": (18, 3), "student": (12, student_heads)}
    found, observed = {}, {}
    for name, (width, heads) in sizes.items():
        theirs = tiny_bert(tmp_path / name, width, heads)
        kept = {}
        attention = theirs.encoder.layer[-1].attention.self
        for part in ("query", "key", "value"):
            getattr(attention, part).register_forward_hook(
                lambda module, given, out, part=part, kept=kept: kept.__setitem__(part, out)
            )
        with torch.no_grad():
            out = theirs(ids, attention_mask=mask, output_attentions=True)
        found[name] = {**kept, "attention": out.attentions[-1]}
        ours = load(tmp_path / name)
        with padding_in_place():
            ours(ids, mask, observe=lambda layer, call, name=name: observed.__setitem__(name, call))

    def related(one, first, second):
        logits = split(one[first], 3) @ split(one[second], 3).transpose(-1, -2) / (one[first].shape[-1] // 3) ** 0.5
        return logits.masked_fill(mask[:, None, None] == 0, -torch.inf).softmax(-1)

    total = 0.0
    for first, second in (("query", "key"), ("value", "value")):
        teacher, student = (related(found[name], first, second) for name in ("teacher", "student"))
        if first == "query":
            torch.testing.assert_close(teacher, found["teacher"]["attention"])
            if student_heads == 3:
                torch.testing.assert_close(student, found["student"]["attention"])
        rows = torch.where(teacher > 0, teacher * (teacher / student).log(), 0.0).sum(-1)  # (B, R, L)
        total += float((rows * mask[:, None]).sum() / (3 * mask.sum()))
    found = relation_distance(observed["student"], observed["teacher"]).item()
    assert found == pytest.approx(total, rel=1e-5)


# --- students ---------------------------------------------------------------------------------------------------------


def test_a_shallower_student_begins_with_blocks_of_its_teacher(objective, deep):
    model, teacher = objective(deep, {"layers": 3}).model, deep.model
    for name, tensor in teacher.state_dict().items():
        if not name.startswith("encoder.blocks."):
            assert torch.equal(model.state_dict()[name], tensor)
    for mine, theirs in enumerate((0, 2, 4)):
        for name, tensor in model.encoder.blocks[mine].state_dict().items():
            assert torch.equal(tensor, teacher.encoder.blocks[theirs].state_dict()[name])


def test_a_narrower_student_keeps_the_shape_of_its_teacher(objective, learned, tmp_path):
    """Heads divide the width, the feed-forward layer stays four times as wide; a whole config.json is taken so."""
    model = objective(learned, "width=9,hidden_dropout_prob=0.0").model
    sizes = {name: model.settings.get(name) for name in ("num_attention_heads", "intermediate_size", "vocab_size")}
    assert sizes == {
        "num_attention_heads": 1,
        "intermediate_size": 36,
        "vocab_size": learned.model.tokens.num_embeddings,
    }
    assert model.settings.get("hidden_dropout_prob") == 0.0 and model.label_names == ["negative", "positive"]
    config = {"model_type": "distilbert", "dim": 14, "n_heads": 7, "n_layers": 1, "hidden_dim": 11}
    (tmp_path / "student.json").write_text(json.dumps(config))
    model = objective(learned, tmp_path / "student.json").model
    assert model.family.name == "DistilBERT" and model.tokens.weight.shape[1] == 14


@pytest.mark.slow
def test_the_teacher_is_learned_and_not_the_truth(learned, files, tmp_path):
    """With weight 1 wrong labels do no harm, and the run is one of the teacher's task in every respect."""
    transformers = pytest.importorskip("transformers")
    rows = [(text, ["negative", "positive"][n % 2]) for n, (text, _) in enumerate(reviews(211, 3))]
    data = write_csv(tmp_path / "wrong.csv", rows)
    options = {**FEW, "steps": 60, "every": 20, "weight": 1.0}
    student = "width=16,hidden_dropout_prob=0.0,attention_probs_dropout_prob=0.0"
    run = tasks.distill(
        learned, student, data, tmp_path / "run", validation=files / "unseen.csv", relations=0.1, hidden=0.1, **options
    )
    assert tasks.test(run.folder, files / "unseen.csv", baseline=False).metrics["accuracy"] == 1.0
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(run.folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(run.folder)
    with torch.no_grad():
        logits = theirs(**tokenizer(["a lovely plot", "dull"], padding=True, return_tensors="pt")).logits
    said = [list(one["probabilities"].values()) for one in tasks.predict(run, ["a lovely plot", "dull"])]
    torch.testing.assert_close(torch.tensor(said), logits.softmax(-1), atol=1e-6, rtol=0)


def test_unlabelled_inputs_get_the_labels_of_the_teacher(learned, files, tmp_path):
    texts = write_csv(tmp_path / "texts.csv", [("dull film",), ("a lovely lovely plot",)], columns=("text",))
    run = distill_request(learned, "layers=1", files / "reviews.csv", tmp_path / "out", {}, unlabelled=texts)
    assert [(one.text, one.label) for one in run.training[-2:]] == [
        ("dull film", "negative"),
        ("a lovely lovely plot", "positive"),
    ]
    assert len(run.training) == 189 + 2 and len(run.validation) == 22


# --- the command, kills, bad input ------------------------------------------------------------------------------------


def test_the_command_has_the_options_of_teaching():
    parameters = typer.main.get_command(_app.app).commands["distill"].params
    options = {parameter.opts[0].removeprefix("--"): parameter.default for parameter in parameters}
    for field in dataclasses.fields(Teaching):
        assert options[field.name] == field.default


@pytest.mark.slow
def test_the_split_is_the_teachers(learned, files, tmp_path):
    """With another seed the student would be judged by what its teacher has learned."""
    _, _, expected = read_data(learned.task, files / "reviews.csv", None, 0, 0.1, fit=False)
    asked = distill_request(learned, {"layers": 1}, files / "reviews.csv", tmp_path / "out", {"seed": 7, "steps": 1})
    assert [one.text for one in asked.validation] == [one.text for one in expected]
    assert (asked.source.seed, asked.settings.seed) == (0, 7)
    with pytest.raises(ValueError, match="out: .* is the folder of the run it starts from; give another folder"):
        distill_request(learned, {"layers": 1}, files / "reviews.csv", learned.folder, {"steps": 1}, overwrite=True)


def test_the_validation_file_is_the_teachers(files, tmp_path):
    """Else the student is judged by a share of what its teacher has learned."""
    data, judged = files / "reviews.csv", files / "unseen.csv"
    teacher = tasks.train("classify", data, tmp_path / "run", validation=judged, **{**SMALL, "steps": 1})
    options = {"steps": 1}
    mine = distill_request(teacher, {"layers": 1}, data, tmp_path / "out", options)
    assert [one.text for one in mine.validation] == [text for text, _ in reviews(101, 5)]
    assert mine.source.validation == judged.resolve() and len(mine.training) == 211
    other = distill_request(teacher, {"layers": 1}, data, tmp_path / "out", options, validation=data)
    assert len(other.validation) == 211
    shared = distill_request(teacher, {"layers": 1}, data, tmp_path / "out", {**options, "share": 0.2})
    assert shared.source.validation is None and len(shared.validation) == 42


@pytest.mark.slow
def test_the_command(learned, files, tmp_path, capsys):
    out = tmp_path / "run"
    options = ["--steps=4", "--precision=no", "--no-tensorboard", "--seeds=2", "--relations=1"]
    given = [str(learned.folder), "width=12", str(files / "reviews.csv"), f"--out={out}"]
    assert cli.main(["distill", *given, *options]) == 0
    told = capsys.readouterr().out.splitlines()
    assert told[0].endswith(" parameters, from random weights")
    assert told[1].startswith(f"taught by {learned.folder}, BERT of ") and told[1].endswith(
        ": weight 0.5, temperature 2, relations 1"
    )
    assert cli.main(["test", str(out), str(files / "unseen.csv"), "--no-baseline"]) == 0


@pytest.mark.slow
def test_kills(server, learned, files, tmp_path):
    """The matrix to the teacher's width learns and is not stored; a checkpoint has it."""
    options = "--hidden 1 --relations 1 --steps 9 --batch 17 --accumulate 2 --precision bf16 --every 4".split()
    arguments = ["distill", str(learned.folder), "width=12", str(files / "reviews.csv")]
    survives_kills(server, tmp_path, [*arguments, *options, "--checkpoint-every=2"])
    assert not any("projection_to" in name for name in load(tmp_path / "whole").state_dict())


def test_bad_input(learned, files, tmp_path):
    data, out = files / "reviews.csv", tmp_path / "out"
    other = tmp_path / "table.csv"
    other.write_text("text,label\nno,maybe\n")
    (tmp_path / "config.json").write_text('{"hidden_size": 3}')
    cases = [
        ({"teacher": tmp_path}, "is not a run of `saccade train`, it has no task.json"),
        ({"data": other}, "table.csv: line 2: the label 'maybe' is not in the training data, which has"),
        ({"temperature": 0.0}, "temperature: must be finite and above 0, got 0.0"),
        ({"weight": 1.5}, "weight: of the teacher's outputs, must be from 0 to 1, got 1.5"),
        ({"hidden": -1.0}, "hidden: must be finite and at least 0, got -1.0"),
        ({"student": "layers=0"}, "student: layers: expected an int of at least 1, got 0"),
        ({"student": "layers=2,width"}, "student: expected settings such as layers=2,width=128, got 'width'"),
        ({"student": "layer=2"}, "student: layer: is neither one of layers, width, heads, hidden nor a setting of the"),
        ({"student": "width=25,heads=7"}, "student: heads: must divide the width, got heads=7 and width=25"),
        ({"student": "hidden_dropout_prob=2"}, r"student: hidden_dropout_prob: expected a number in \[0, 1\)"),
        ({"student": "vocab_size=7"}, "student: vocab_size is 7, and the teacher's"),
        ({"student": tmp_path / "config.json"}, "config.json: names no model_type"),
        ({"student": tmp_path / "nowhere"}, "nowhere"),
    ]
    for changes, message in cases:
        given = {"teacher": learned, "student": "layers=1", "data": data, **changes}
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            tasks.distill(out=out, **given, **FEW)
    with pytest.raises(TypeError, match="width: no option of distill"):
        tasks.distill(learned, "layers=1", data, out, width=12)
    assert not out.exists()


def test_a_student_of_another_kind_is_refused(learned, tmp_path, objective, monkeypatch):
    """Other labels, other tokens, and attention that has no weights."""
    rows = [(f"{text} indeed", f"{label}!") for text, label in reviews(60, 9)]
    other = tasks.train(
        "classify", write_csv(tmp_path / "other.csv", rows), tmp_path / "other", **{**SMALL, "steps": 1}
    )
    with pytest.raises(ValueError, match="student: .*other has the labels negative!, positive!; its teacher has neg"):
        objective(learned, other.folder)
    (other.folder / "task.json").unlink()
    with pytest.raises(ValueError, match="student: it does not read the tokens, pixels or samples that .*ned reads"):
        objective(learned, other.folder)
    forward = tasks.Classify.forward
    monkeypatch.setattr(tasks.Classify, "forward", lambda self, model, batch, observe=None: forward(self, model, batch))
    with pytest.raises(ValueError, match="relations: attention of the student, a BERT, cannot be observed"):
        objective(learned, "layers=1", relations=1.0)


# --- other tasks ------------------------------------------------------------------------------------------------------


def tagged(folder):
    """Sentences whose batches have unequally many words in each part, some of several pieces."""
    kinds = ("Paris\tB-place\nplaces\tI-place", "Ada\tB-person", "xyzzyx\tO")
    sentences = [f"We\tO\nsaw\tO\n{kinds[n % 3]}\n" * (n % 4 + 1) for n in range(23)]
    (folder / "tags.conll").write_text("\n".join(sentences))
    return folder / "tags.conll", {}


def questioned(folder):
    """Contexts of unequal lengths, some of which are read in two windows."""
    lines = []
    for n in range(23):
        context = f"{'So it was. ' * (n % 5)}Ada went to the {('park', 'garden')[n % 2]}."
        answer = {"text": context.split()[-1][:-1], "start": context.rindex(" ") + 1}
        lines.append(json.dumps({"question": "Where is Ada?", "context": context, "answers": [answer]}))
    (folder / "questions.jsonl").write_text("\n".join(lines))
    return folder / "questions.jsonl", {"longest": 20}


def plain_texts(folder):
    (folder / "texts.txt").write_text("\n".join(text for text, _ in reviews(41, 3)))
    return folder / "texts.txt", {}


def several(folder):
    """Texts of two labels, one of them, or none."""
    rows = [f'{text},"{("", "a", "b", "a;b")[n % 4]}"' for n, (text, _) in enumerate(reviews(41, 3))]
    (folder / "labels.csv").write_text("\n".join(["text,label", *rows]))
    return folder / "labels.csv", {"several": ";"}


def images(folder):
    Image = pytest.importorskip("PIL.Image")
    for label, shade in (("dark", 40), ("bright", 200)):
        (folder / "images" / label).mkdir(parents=True)
        for n in range(11):
            Image.new("RGB", (17, 13), (shade, shade + n, shade)).save(folder / "images" / label / f"{n}.png")
    return folder / "images", {}


def sounds(folder):
    pytest.importorskip("soundfile")
    from tasks.sounds import write_classes

    return write_classes(folder / "sounds", 23, 3), {"dropout": 0.0, "mask_time": 0.0, "mask_channels": 0.0}


@pytest.mark.slow
@pytest.mark.parametrize(
    "task, made, rows",
    [
        ("tag", tagged, 1),
        ("answer", questioned, 1),
        ("mlm", plain_texts, 1),
        ("image", images, 1),
        ("speech", sounds, 1),
        ("classify", several, 2),
    ],
)
def test_every_task_with_logits_can_be_taught(tmp_path, task, made, rows):
    """The rows of logits are those that the task's loss is a mean over, padding and other words are none of them; a
    student that says what its teacher says has nothing to learn; parts add up."""
    data, options = made(tmp_path)
    sizes = {"width": 12, "layers": 3, "heads": 2, **({} if task in ("image", "speech") else {"vocabulary": 60})}
    few = {**FEW, "steps": 2, "batch": 7, "every": 2}
    teacher = tasks.train(task, data, tmp_path / "teacher", **sizes, **options, **few)
    run = distill_request(teacher, "layers=3", data, tmp_path / "out", {**few, "weight": 1.0, "relations": 1.0})
    same = PreparedTaskRun.of(run, None).objective
    batch = same.batch(1)
    same.model.eval()
    with torch.no_grad():
        logits = same._task.logits(same._task.forward(same.model, batch), batch)
        assert all(len(found) == rows * same.weight(batch) for found in logits)
        assert abs(float(same.loss(same.model, batch))) < 1e-6
    run = distill_request(
        teacher, "layers=1,width=8,heads=4", data, tmp_path / "out", {**few, "hidden": 0.7, "relations": 0.4}
    )
    other = PreparedTaskRun.of(run, None).objective
    other.model.eval()
    parts = other.split(batch, 3)
    joined = sum(other.weight(part) / other.weight(batch) * other.loss(other.model, part) for part in parts)
    torch.testing.assert_close(joined, other.loss(other.model, batch))
    student = tasks.distill(teacher, "layers=1", data, tmp_path / "student", hidden=0.1, relations=0.1, **few)
    assert (
        tasks.test(student.folder, data, baseline=False).metrics.keys()
        == tasks.test(teacher, data, baseline=False).metrics.keys()
    )


def test_a_task_whose_outputs_are_no_choices_is_refused(tmp_path):
    source = TaskFile(tasks.Forecast(), tmp_path, None, {}, 0, 0.1)
    (tmp_path / "task.json").write_text(source.to_json())
    expected = "is a run of forecast, without outputs .*; expected a run of answer, classify, image, mlm, speech, tag$"
    with pytest.raises(ValueError, match=expected):
        tasks.distill(tmp_path, "layers=1", tmp_path / "data.csv", tmp_path / "out")
