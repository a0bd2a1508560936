"""Terms of the field, and the words that our pages use for them.

Each key is words of the title of a page or section; each value lists terms that it answers.
"""

from __future__ import annotations

LEARNING = {
    "attention by hand": "worked example, numerical example, numeric example, toy example, example calculation",
    "several heads": "multi-head attention, multihead attention, concatenate heads, multiple heads",
    "many heads": "grouped-query attention, multi-query attention, gqa, mqa",
    "query key and value": "qkv, query key value, queries keys values, projections",
    "scores": "dot product, dot-product attention, attention scores, logits",
    "weighted sum": "context vector, weighted average",
    "scale": "scaling factor, scaled dot product, temperature",
    "the operator and masks": "causal mask, causal masking, look-ahead mask, triangular mask, attention mask, masking, "
    "masks",
    "masks and padding": "padding mask, key padding mask, padding",
    "positions": "positional encoding, position encoding, positional embedding, position embedding, positional "
    "encodings",
    "rotary": "rope, rotary embedding, rotary position embedding",
    "biases on the logits": "alibi, relative position, relative positional encoding, relative position bias",
    "longer contexts": "context length, length extrapolation, context extension, yarn, length generalization",
    "the block": "layer normalization, layer norm, layernorm, pre-norm, post-norm, residual connection, feed-forward, "
    "feedforward, feed-forward network, transformer block, skip connection",
    "encoder-decoders": "cross-attention, encoder-decoder attention, cross attention",
    "connects all positions in constant time": "path length, maximum path length, time complexity, computational cost",
    "the original transformer": "encoder-decoder, original transformer, attention is all you need, vanilla transformer",
    "permutation invariant": "permutation invariance, permutation equivariance, order invariance",
}
CHOOSING = {
    "variants of attention": "long sequences, long sequence, long documents, efficient attention, efficient "
    "transformer, quadratic complexity, quadratic cost, quadratic time, subquadratic, linear complexity",
    "which attention solves what": "long-range dependencies, long-range dependency, long-term dependencies, long-range",
    "which attention should i choose": "rnn, lstm, gru, recurrent network, recurrent neural network, recurrence, "
    "convolution, cnn, convolutional network, mlp, state space model, mamba",
    "gated-delta": "deltanet, gated deltanet, delta rule, fast weight programmer, linear rnn, WY representation",
    "linear": "kernel trick, linear attention, kernel feature map, linearized attention, kernelized attention",
    "linformer": "low-rank, low-rank attention, low-rank approximation, low-rank projection",
    "performer": "random features, random feature attention, favor+",
    "reformer": "lsh, locality-sensitive hashing, hashing",
    "nystrom": "nystromformer, landmarks",
    "sparse patterns": "sparse attention, sparsity, local attention, block-sparse attention",
    "sliding window": "window attention, banded attention",
    "attention sinks and endless streams": "streaming, streaming llm, attention sink, sink tokens, infinite context",
    "backends": "flashattention, flash attention, memory-efficient attention, fused kernel, gpu, cuda, kernels",
    "what each remedy costs and saves": "gradient checkpointing, activation checkpointing, memory footprint, memory "
    "usage, memory, out of memory, oom, mixed precision, half precision, bfloat16, fp16, autocast, gradient "
    "accumulation",
    "precision": "float16, numerical precision, underflow, overflow",
    "how fast is attention": "benchmark, speed, throughput, latency, profiling",
    "accelerating a model": "inference speed, speed up, acceleration, optimize inference",
    "caches": "kv cache, key-value cache, incremental decoding",
    "batches of unequal length": "variable length, ragged batch, packing, nested tensor, bucketing",
    "grouped by length": "group by length, length bucketing, sort by length",
}
LOOKING = {
    "what saccade look shows": "visualize attention, visualise attention, visualization, attention map, attention "
    "maps, attention visualization, bertviz, heatmap, heat map, attention weights, plot attention",
    "drawing weights": "figure, plot, matplotlib",
    "diagrams": "architecture diagram, diagram, schematic",
    "what is this head for": "interpretability, mechanistic interpretability, explainability, explainable ai, "
    "induction head, circuits, head importance, attribution, saliency, logit lens",
    "patch": "activation patching, causal tracing, attribution patching, path patching",
    "switch it off": "ablation, ablate head, head ablation, knock out",
    "what each layer knows": "probing classifier, probing, linear probe, probing task, representation analysis",
    "heads against grammar": "subject-verb agreement, syntax, dependency parsing, parse tree, treebank, grammar",
    "heads against coreference": "coreference, coreference resolution, anaphora",
    "what it looks at": "pronoun, pronoun resolution, winograd",
    "histograms": "histogram, distribution of weights",
    "what fires and when": "dead head, collapsed head, entropy collapse, attention collapse, loss spike",
    "gradients": "exploding gradients, vanishing gradients, gradient norms, gradient norm, gradient clipping, clip "
    "gradients, gradient flow",
    "what each number means": "entropy, effective number of keys, attention entropy",
    "where a nan came from": "nan, not a number, inf, nan loss",
    "when a run goes wrong": "training instability, divergence, diverging loss, unstable training",
    "monitoring a training run": "tensorboard, wandb, logging, mlflow",
    "from the symptom to the head": "debugging, debug, troubleshooting, my model does not work",
    "repeatable": "reproducibility, determinism, random seed, seed",
    "verifying an implementation": "unit test, correctness, test my attention, check implementation",
}
TASKS = {
    "classes of texts": "sentiment analysis, sentiment classification, sentiment, text classification, document "
    "classification, topic classification, spam detection, spam, intent detection, emotion detection, emotion "
    "classification, natural language inference",
    "texts of several labels": "multi-label classification, multilabel, multi-label, tagging documents",
    "entities in texts": "named entity recognition, ner, part-of-speech tagging, part of speech, pos tagging, sequence "
    "labelling, sequence labeling, token classification, sequence tagging, chunking",
    "answers in a text": "question answering, reading comprehension, squad, extractive qa, qa",
    "translation translate": "machine translation, translation, neural machine translation, nmt, sequence-to-sequence, "
    "seq2seq",
    "masked pieces of texts": "masked language model, masked language modeling, mlm, pretraining, pre-training, cloze",
    "classes of images": "computer vision, image classification, image recognition, vision",
    "vit": "vision transformer, image transformer, patch embedding",
    "sounds classes": "speech recognition, automatic speech recognition, asr, speech to text, audio, audio "
    "classification, transcription, ctc, keyword spotting",
    "forecasts of series": "forecasting, time series forecasting, stock prices, demand forecasting",
    "classes of nodes": "node classification, citation network",
    "graphs gat and graphormer": "graph neural network, graph neural networks, gnn, graph attention, graph attention "
    "network, graph transformer",
    "proteins": "protein, protein language model, amino acids, biology, dna",
    "searching for settings": "hyperparameters, hyper-parameters, hyper-parameter tuning, hyper-parameter search, "
    "hyperparameter, hyperparameter search, hyperparameter tuning, grid search, random search, bayesian optimization, "
    "optuna, tuning",
    "which learning rate": "learning rate, learning rate schedule, warm-up, warmup, optimizer, adam",
    "a smaller model that is taught": "knowledge distillation, distillation, teacher-student, student model, model "
    "compression",
    "start from a checkpoint": "transfer learning, fine-tuning, finetuning, pretrained model, pre-trained weights, "
    "domain adaptation",
    "let less learn": "lora, adapter, adapters, parameter-efficient fine-tuning, peft, freezing, freeze layers",
    "too few data": "overfitting, overfit, regularization, regularisation, small data, data augmentation, few-shot, "
    "generalization gap, underfitting",
    "stopping and going on": "early stopping, resume training, checkpointing",
    "several processes": "distributed training, multi-gpu, data parallel, ddp, fsdp",
    "removing heads": "model pruning, pruning, head pruning, redundant heads, structured pruning",
    "training and generating": "language model training, perplexity, train a language model",
    "one vector for each text": "sentence embeddings, sentence embedding, embeddings, semantic search, similarity, "
    "retrieval",
    "generating": "text generation, autoregressive, autoregressive generation, sampling, decoding, nucleus sampling, "
    "top-k, summarization, chatbot",
    "hugging face models": "transformers, huggingface, hugging face, attn_implementation",
    "llama": "mistral, qwen, smollm, large language model, llm",
}
SYNONYMS: dict[str, str] = LEARNING | CHOOSING | LOOKING | TASKS
