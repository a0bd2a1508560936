"""Models that the processes of a group are given, and what one process makes of them."""

from __future__ import annotations

import contextlib
import functools
import threading

import torch
import torch.distributed as dist
import torch.nn.functional as F
import transformers
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.parallel import DistributedDataParallel

import saccade
from saccade import Causal, Documents, Padding, Window, attention, distributed, models, nn, positions, variants
from saccade.models import LanguageModel

LENGTH, VOCABULARY, PADDING = 61, 29, 1
DOCUMENTS = [0] * 17 + [1] * 23 + [2] * 21
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "max_position_embeddings": 64,
}


def decoder(kind, more):
    torch.manual_seed(3)
    if kind == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=VOCABULARY,
            n_embd=24,
            n_layer=2,
            n_head=3,
            n_positions=64,
            bos_token_id=0,
            eos_token_id=0,
            **more,
        )
    else:
        config = transformers.AutoConfig.for_model(kind, **{**SMALL, **more})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def own(folder, more):
    """A model of Saccade: that of a published family in `folder`; None: its own language model."""
    if folder is not None:
        return models.load(folder)
    torch.manual_seed(3)
    config = models.ModelConfig(VOCABULARY, width=24, layers=2, heads=6, kv_heads=3, context=64, **more)
    return LanguageModel(models.DecoderLM(config), None).eval()


def batch(packed):
    """Two rows of tokens; in packed ones positions start anew in each document."""
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(0, VOCABULARY, (2, LENGTH), generator=draw)
    labels = ids.masked_fill(torch.rand(2, LENGTH, generator=draw) < 0.2, -100)
    made = {"input_ids": ids, "labels": labels}
    if packed:
        starts = [DOCUMENTS.index(document) for document in DOCUMENTS]
        made["position_ids"] = (torch.arange(LENGTH) - torch.tensor(starts)).expand(2, LENGTH)
    return made


def answer(model, output):
    output.loss.backward()
    grads = {name: x.grad for name, x in model.named_parameters() if x.grad is not None}
    return {"logits": output.logits.detach(), "loss": output.loss.detach()}, grads


def whole(kind, packed, more, make=decoder, autocast=False):
    model = make(kind, more)
    uncached = {"use_cache": False} if make is decoder else {}  # with a cache, positions mean no documents
    with torch.autocast("cpu", torch.bfloat16, autocast):
        output = model(**batch(packed), **uncached)
    return answer(model, output)


def own_whole(folder, packed):
    """As `whole`: the documents one by one, since a model of Saccade takes no mask."""
    model = own(folder, {})
    logits, loss = by_document(model, batch(False), packed)
    return answer(model, models.output.ModelOutput(logits=logits, loss=loss))


def by_document(model, given, packed=True):
    cuts = [DOCUMENTS.count(document) for document in sorted(set(DOCUMENTS))] if packed else [LENGTH]
    logits = torch.cat([model(ids).logits for ids in given["input_ids"].split(cuts, 1)], 1)
    targets = F.pad(given["labels"][:, 1:], (0, 1), value=-100)
    return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class Stack(torch.nn.Module):
    """A module of a user, with layers of `saccade.nn`: sink, cap, rotary positions, a learned bias, a window."""

    def __init__(self, checkpointing=False):
        super().__init__()
        torch.manual_seed(7)
        rotary, learned = positions.RotaryConfig(), positions.T5Config()
        layers = [
            nn.BlockConfig(nn.AttentionConfig(24, heads=6, kv_heads=3, positions=rotary, sink=True, qk_norm="rms")),
            nn.BlockConfig(nn.AttentionConfig(24, heads=6, positions=learned, softcap=5.0, window=Window(7, 3))),
        ]
        self.places = positions.Learned(LENGTH, 24)
        self.encoder = nn.Encoder(layers, checkpointing=checkpointing)
        self.last = nn.SelfAttention(24, 5)
        self.double()
        torch.nn.init.normal_(self.encoder.blocks[0].attention.sink)

    def forward(self, x, mask):
        return self.last(self.encoder(self.places(x), mask), mask)


def stack_input():
    x, weight = torch.randn(2, 2, LENGTH, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(8))
    return x.requires_grad_(), weight[..., :5], Documents(DOCUMENTS)


def stack_whole():
    model, (x, weight, mask) = Stack(), stack_input()
    out = model(x, mask)
    (out * weight).sum().backward()
    return out.detach(), {"x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}


def stack_on_shards(rank, plan_has_mask, checkpointing):
    """As `stack_whole`, with this rank's share of the gradients. The layers or the plan have the mask."""
    model, (x, weight, mask) = Stack(checkpointing), stack_input()
    plan = distributed.plan(mask if plan_has_mask else None, LENGTH)
    with distributed.context_parallel(model, plan):
        out = model(plan.shard(x, 1), None if plan_has_mask else mask)
    (out * plan.shard(weight, 1)).sum().backward()
    return plan.unshard(out, 1).detach(), {"x": x.grad, **{name: p.grad for name, p in model.named_parameters()}}


def on_shards(rank, kind, layout, packed, more, make=decoder, autocast=False):
    """As `whole`, with this rank's share of loss and gradients."""
    model = make(kind, more)
    plan = distributed.plan(Causal() & Documents(DOCUMENTS) if packed else Causal(), LENGTH, layout=layout)
    with distributed.context_parallel(model, plan), torch.autocast("cpu", torch.bfloat16, autocast):
        output = model(**distributed.shard(batch(packed), plan))
    values, grads = answer(model, output)
    return {**values, "logits": plan.unshard(values["logits"], 1)}, grads


def encoder(kind, more, head="ForMaskedLM"):
    """A small encoder of transformers. Its weights are large, so that attention is far from a mean."""
    torch.manual_seed(3)
    names = {"hidden_size": "dim", "intermediate_size": "hidden_dim", "num_hidden_layers": "n_layers"}
    names = {**names, "num_attention_heads": "n_heads"} if kind == "distilbert" else {}
    sizes = {**SMALL, "max_position_embeddings": 80, "type_vocab_size": 2, "num_labels": 5, "initializer_range": 0.2}
    sizes |= {**{f"{name}_token_id": 0 for name in ("bos", "eos", "cls", "sep")}, "pad_token_id": PADDING}
    sizes |= {"languages": ["en_XX"], "default_language": "en_XX"} if kind == "xmod" else {}
    config = transformers.AutoConfig.for_model(kind, **{names.get(name, name): x for name, x in sizes.items()}, **more)
    return getattr(transformers, f"AutoModel{head}").from_config(config).eval()


def own_encoder(folder, more, head="masked-lm"):
    return models.load(folder, head=head).eval()


def encoded(padded, types=True):
    """A batch with labels of some rows; the second item is padded on both sides."""
    draw = torch.Generator().manual_seed(5)
    ids = torch.randint(PADDING + 1, VOCABULARY, (2, LENGTH), generator=draw)
    real = torch.ones(2, LENGTH, dtype=torch.bool)
    if padded:
        real[1, :5], real[1, 43:] = False, False
    hidden = ~real | (torch.rand(2, LENGTH, generator=draw) < 0.7)
    labels = torch.randint(0, 5, (2, LENGTH), generator=draw).masked_fill(hidden, -100)
    made = {"input_ids": ids.masked_fill(~real, PADDING), "labels": labels}
    if types:
        made["token_type_ids"] = ids % 2
    return made, real


def encoded_for(model, padded):
    given, real = encoded(padded, any("type" in name for name, _ in model.named_parameters()))
    if getattr(model, "places", None) is not None and not hasattr(model, "padding") and not hasattr(model, "pad"):
        # Saccade's BERT counts from the first real token.
        given["position_ids"] = (torch.arange(LENGTH) - real.int().argmax(1)[:, None]).clamp(min=0)
    return given, real


def encoded_whole(make, kind, more, padded, *args):
    model = make(kind, more, *args)
    given, real = encoded_for(model, padded)
    values, grads = answer(model, model(**given, attention_mask=real.long() if padded else None))
    return {**values, "logits": values["logits"][real]}, grads


def encoded_on_shards(rank, make, kind, more, padded, layout, *args):
    """As `encoded_whole`, with this rank's share of loss and gradients."""
    model = make(kind, more, *args)
    given, real = encoded_for(model, padded)
    plan = distributed.plan(Padding(real) if padded else None, LENGTH, layout=layout)
    with distributed.context_parallel(model, plan):
        output = model(**distributed.shard(given, plan, shift_labels=False))
    values, grads = answer(model, output)
    return {**values, "logits": plan.unshard(values["logits"], 1)[real]}, grads


def counted():
    """A model that counts positions from a padding token, and inputs: with positions, without ids, with padding that
    no mask hides."""
    model, given = encoder("roberta", {}, "").base_model, encoded(False)[0]
    starts = torch.tensor([DOCUMENTS.index(document) for document in DOCUMENTS])
    packed = (torch.arange(LENGTH) - starts + PADDING + 1).expand(2, LENGTH)
    embedded = {"inputs_embeds": model.embeddings.word_embeddings(given["input_ids"]).detach()}
    padded = {"input_ids": encoded(True)[0]["input_ids"]}
    return model, ({"input_ids": given["input_ids"], "position_ids": packed}, embedded, padded)


def counted_whole():
    model, inputs = counted()
    return [model(**given).last_hidden_state.detach() for given in inputs]


def counted_on_shards(rank):
    model, inputs = counted()
    plan = distributed.plan(None, LENGTH)
    with torch.no_grad(), distributed.context_parallel(model, plan):
        outputs = [model(**distributed.shard(given, plan, shift_labels=False)) for given in inputs]
    return [plan.unshard(output.last_hidden_state, 1) for output in outputs]


def pooled_whole():
    model, given = encoder("bert", {}, "ForSequenceClassification"), encoded(False)[0]
    output = model(**{**given, "labels": torch.tensor([4, 2])})
    return answer(model, output)


def pooled_on_shards(rank):
    """As `pooled_whole`: the head is called in each process, on the rows of all."""
    model, given = encoder("bert", {}, "ForSequenceClassification"), encoded(False)[0]
    plan, labels = distributed.plan(None, LENGTH), given.pop("labels")
    with distributed.context_parallel(model.bert, plan):
        output = model.bert(**distributed.shard(given, plan))
    logits = model.classifier(model.bert.pooler(plan.unshard(output.last_hidden_state, 1)))
    loss = F.cross_entropy(logits, torch.tensor([4, 2])) / plan.ranks
    assert labels.shape == (2, LENGTH) and output.pooler_output is None and len(output.to_tuple()) == 1
    return answer(model, models.output.ModelOutput(logits=logits, loss=loss))


def checkpointed(rank, way):
    """Loss and gradients of a training step without and with checkpointing, which must be the same to the bit."""
    model = decoder("llama", {"attention_dropout": 0.3}).train()
    plan = distributed.plan(Causal(), LENGTH, layout="ring")
    before = step_on_thread(model, plan)
    if way == "wrapper":
        for layer, module in enumerate(model.model.layers):
            model.model.layers[layer] = checkpoint_wrapper(module)
    else:
        model.activation_checkpointing_enable({"use_reentrant": way == "reentrant"})
    return before, step_on_thread(model, plan)


def step_on_thread(model, plan):
    """The backward pass is on another thread, as that of a GPU, and the block has ended."""
    model.zero_grad()
    torch.manual_seed(11)  # of attention's dropout
    with distributed.context_parallel(model, plan):
        loss = model(**distributed.shard(batch(False), plan)).loss
    worker = threading.Thread(target=loss.backward)
    worker.start()
    worker.join()
    return [loss.detach(), *(weight.grad.clone() for weight in model.parameters())]


def beside_data_parallel(rank, wrapper, own_model):
    """The loss of this rank's row of the batch, and whole gradients: two rows of data, each over two ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "context"))
    model = own(None, {}) if own_model else decoder("llama", {})
    parts = model.model.decoder.blocks if own_model else model.model.layers
    if wrapper == "ddp":
        model = DistributedDataParallel(model)
    else:
        for part in (*parts, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (4,)))
    row = mesh["data"].get_local_rank()
    plan = distributed.plan(Causal(), LENGTH, group=mesh["context"].get_group())
    with distributed.context_parallel(model, plan):
        loss = model(**distributed.shard({name: x[row : row + 1] for name, x in batch(False).items()}, plan)).loss
    (plan.ranks * loss).backward()
    grads = {name.removeprefix("module."): weight.grad for name, weight in model.named_parameters()}
    return loss.detach(), {n: x.full_tensor() if isinstance(x, DTensor) else x for n, x in grads.items()}


def rows_apart(own_model):
    """As `beside_data_parallel`, with one row after the other."""
    model, losses = own(None, {}) if own_model else decoder("llama", {}), []
    for row in range(2):
        loss = model(**{name: x[row : row + 1] for name, x in batch(False).items()}).loss
        (loss / 2).backward()
        losses.append(loss.detach())
    return losses, {name: weight.grad for name, weight in model.named_parameters()}


def text(step):
    """A batch with documents in which each token but some follows from the one before."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(0, VOCABULARY, (2, LENGTH), generator=draw)
    surprises = torch.rand(2, LENGTH, generator=draw) < 0.1
    for at in range(1, LENGTH):
        if DOCUMENTS[at] == DOCUMENTS[at - 1]:
            ids[:, at] = torch.where(surprises[:, at], ids[:, at], (3 * ids[:, at - 1] + 1) % VOCABULARY)
    return {**batch(True), "input_ids": ids, "labels": ids}


def losses(model, step_loss, whole_gradients=lambda weight: None, steps=300):
    optimizer, found = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for step in range(steps):
        optimizer.zero_grad()
        found.append(step_loss(text(step)))
        for weight in model.parameters():
            whole_gradients(weight)
        optimizer.step()
    return torch.tensor(found, dtype=torch.float64)


def trained_whole(make, kind, more, dtype):
    """The losses of all steps in one process."""
    model = make(kind, more).to(dtype)

    def step(given):
        loss = model(**given, use_cache=False).loss if make is decoder else by_document(model, given)[1]
        loss.backward()
        return loss.item()

    return losses(model, step)


def trained_on_shards(rank, make, kind, more):
    """As `trained_whole`, by the steps that the guide shows."""
    model, plan = make(kind, more), distributed.plan(Causal() & Documents(DOCUMENTS), LENGTH, layout="ring")

    def step(given):
        with distributed.context_parallel(model, plan):
            loss = model(**distributed.shard(given, plan)).loss
        loss.backward()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item()

    return losses(model, step, lambda weight: dist.all_reduce(weight.grad))


def refused(rank, fault):
    """The error of a call that cannot be right on shards."""
    kind, more = "llama", {}
    if fault == "type":
        kind = "mamba"
    elif fault == "rotary":
        more = {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}
    elif fault == "own attention":
        kind, more = "gpt2", {"reorder_and_upcast_attn": True, "attn_implementation": "eager"}
    elif fault == "unknown mask":
        kind, more = "gemma3_text", {"use_bidirectional_attention": True, "head_dim": 4}
    elif fault == "token dropout":
        more = {"token_dropout": True, "mask_token_id": 2}
    elif fault == "decodes":
        more = {"is_decoder": True}
    encodes = {"pools": "bert", "shifted": "roberta", "uncounted": "bert", "token dropout": "esm", "decodes": "bert"}
    encodes |= {"tuple": "bert", "no positions": "bert", "own loss": "bert", "one layer": "bert"}
    head = "ForSequenceClassification" if fault == "pools" else "ForMaskedLM"
    model = encoder(encodes[fault], more, head) if fault in encodes else decoder(kind, more)
    if fault == "own loss":
        model.loss_function = F.mse_loss
    elif fault == "one layer":
        model.bert.encoder.layer[1].attention.self.forward = lambda x, *args, **more: (x, None)
    plan, given = distributed.plan(Causal(), LENGTH), batch(fault == "documents")
    shifted = fault not in encodes or fault == "shifted"
    if fault == "not shifted":
        shifted = False
    if fault == "padding":
        given["attention_mask"] = torch.ones(2, LENGTH).tril(-1)
    try:
        with distributed.context_parallel(model, plan):
            shard = distributed.shard(given, plan, shift_labels=shifted)
            changes = {
                "positions": {"position_ids": None},
                "rows": {"input_ids": shard["input_ids"][:, 1:]},
                "shift": {"shift_labels": None},
                "weights": {"output_attentions": True},
                "uncounted": {"num_items_in_batch": None},
                "tuple": {"return_dict": False},
                "no positions": {"position_ids": None},
                "own mask": {"attention_mask": torch.zeros(2, 1, plan.held(rank), plan.held(rank))},
                "hidden keys": {"attention_mask": torch.zeros(2, plan.held(rank))},
            }
            model(**{**shard, **changes.get(fault, {})})
    except (TypeError, ValueError) as error:
        return str(error)


class Layer(torch.nn.Module):
    """Attention of a user."""

    def __init__(self, attend):
        super().__init__()
        self.inner, self.attend = torch.nn.Linear(24, 24), attend

    def forward(self, x):
        heads = self.inner(x)[:, None]
        return self.attend(heads, heads, heads)[:, 0]


def own_refused(rank, fault):
    """As `refused`, for models that call `saccade.attention`."""
    plan, more = distributed.plan(Causal(), 65 if fault == "context" else LENGTH), {}
    config = nn.BlockConfig(nn.AttentionConfig(24, heads=3))
    x = torch.zeros(1, plan.held(rank), 24)
    ids = torch.zeros(1, plan.held(rank), dtype=torch.long)
    model, given = {
        "sdpa": lambda: (Layer(lambda *inputs: F.scaled_dot_product_attention(*inputs)), x),
        "flex": lambda: (Layer(lambda *inputs: flex_attention(*inputs)), x),
        "nothing": lambda: (torch.nn.Sequential(torch.nn.Linear(24, 24)), x),
        "convolution": lambda: (torch.nn.Sequential(torch.nn.Conv1d(24, 24, 3), Layer(attention)), x),
        "backend": lambda: (Layer(functools.partial(attention, backend="chunked")), x),
        "mechanism": lambda: (own(None, {"mechanism": variants.LinearConfig()}), ids),
        "layer drop": lambda: (nn.Encoder(config, 2, layer_drop=0.5), x),
        "weights": lambda: (nn.Encoder(config, 2), x),
    }.get(fault, lambda: (own(None, {}), ids))()
    if fault == "weights":
        more = {"return_weights": True}
    elif fault == "shift":
        more = {"labels": ids}
    elif fault == "not shifted":
        more = {"labels": ids, "num_items_in_batch": 3}
    elif fault == "hidden keys":
        more = {"attention_mask": torch.zeros_like(ids)}
    elif fault == "rows":
        given = ids[:, 1:]
    edits = saccade.intervene(model, {0: saccade.intervention.Ablate([1])}) if fault == "edit" else None
    try:
        with edits or contextlib.nullcontext(), distributed.context_parallel(model, plan):
            model(given, **more)
    except (TypeError, ValueError) as error:
        return str(error)


def own_encoder_refused(rank, folder, changes):
    """As `refused`, for an encoder of Saccade."""
    plan, given = distributed.plan(None, LENGTH), encoded(False, types=False)[0]
    try:
        model = models.load(folder)
        with distributed.context_parallel(model, plan):
            model(**{**distributed.shard(given, plan, shift_labels=False), **changes})
    except (TypeError, ValueError) as error:
        return str(error)


def own_pooled(rank, folder):
    """Whether an encoder of Saccade pools a vector in one process, and on shards."""
    model, plan, given = models.load(folder), distributed.plan(None, LENGTH), {"input_ids": batch(False)["input_ids"]}
    before = model(**given).pooler_output
    with distributed.context_parallel(model, plan):
        return before is not None, model(**distributed.shard(given, plan)).pooler_output is not None


def untouched(rank, make, kind):
    """Whether the model, and another one in the block, do afterwards what they did before."""
    model, other, ids = make(kind, {}), (decoder("gpt2", {}), own(None, {})), batch(False)["input_ids"]
    plan, before = distributed.plan(Causal(), LENGTH), [one(ids).logits for one in (model, *other)]
    with distributed.context_parallel(model, plan):
        beside = [one(ids).logits for one in other]
    return all(x.equal(y) for x, y in zip(before, [model(ids).logits, *beside], strict=True))


class Before(torch.nn.Module):
    """A layer with positional arguments alone."""

    def __init__(self):
        super().__init__()
        self.linear = torch.nn.Linear(24, 24).double()

    def forward(self, x, /):
        return self.linear(x)


def surrounded(rank):
    """Whether a model is right in a block around another model's, with a layer that takes positional arguments alone;
    and whether another thread's call of it, meanwhile, is of a whole sequence."""
    torch.manual_seed(1)
    (x, _, mask), whole = stack_input(), Stack()
    model = torch.nn.Sequential(Before(), whole.places, whole.last)
    plan, beside, alone = distributed.plan(mask, LENGTH), [], threading.local()
    short = x[:, : plan.held(rank)].detach()

    def meanwhile(module, args, out):
        if not hasattr(alone, "is_main"):
            return
        del alone.is_main
        thread = threading.Thread(target=lambda: beside.append(model[1](short)))
        thread.start()
        thread.join()

    model[0].register_forward_hook(meanwhile)
    alone.is_main = True
    with torch.no_grad(), distributed.context_parallel(model, plan), distributed.context_parallel(Stack(), plan):
        out = plan.unshard(model(plan.shard(x, 1)), 1)
    with torch.no_grad():
        expected = model[2](model[1](model[0](x)), mask)
        return bool((out - expected).abs().max() < 1e-12), beside[0].equal(model[1](short))
