"""Translation with an encoder-decoder Transformer (transformers' Marian with new weights) and its own subwords.

Byte-pair encoding is learned on both languages of the training text. Batches hold sentences of like length up to a
number of tokens, as in fairseq: they are cut once, and each epoch takes them in a new order. A sample, for NGPlus, is a
sentence pair; the loss is a mean over the target's tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from sacrebleu.metrics.bleu import BLEU
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import MarianConfig, MarianMTModel

from ngplus.lab.workloads.base import DataError, Preset, Task
from ngplus.lab.workloads.files import Arrays, Folder, cached
from ngplus.lab.workloads.sampling import batch_index, device_of, evaluating

PAD, EOS, UNKNOWN = 0, 1, 2
Pairs = tuple[list[str], list[str]]
Tokens = list[np.ndarray[Any, Any]]


def read_pair(source: Folder, *stems: str, languages: tuple[str, str]) -> tuple[Pairs, list[Path]]:
    """Two files of one sentence a line, ``<stem>.<language>`` or ``<stem>.<language>.gz``; pairs with an empty side are
    left out. Also the paths of the two."""
    paths = [source.require(*(f"{s}.{lang}{end}" for s in stems for end in ("", ".gz"))) for lang in languages]
    left, right = (source.text(path).split("\n") for path in paths)
    while left and right and not left[-1] and not right[-1]:
        del left[-1], right[-1]
    if len(left) != len(right):
        raise source.damaged(paths[1], f"{len(right)} lines, where {paths[0].name} has {len(left)}")
    kept = [(a.strip(), b.strip()) for a, b in zip(left, right, strict=True) if a.strip() and b.strip()]
    if not kept:
        raise source.damaged(paths[0], "it has no sentences")
    return ([a for a, _ in kept], [b for _, b in kept]), paths


def learn_subwords(text: Iterable[str], size: int) -> Tokenizer:
    """Byte-pair encoding on words that keep their space as a mark, so that decoding gives the text back."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation()])
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=["<pad>", "</s>", "<unk>"], show_progress=False)
    tokenizer.train_from_iterator(text, trainer)
    return tokenizer


# fairseq's transformer_iwslt_de_en, with its dropout and label smoothing
PAPER = {
    "model": {"layers": 6, "width": 512, "inner": 1024, "heads": 4, "dropout": 0.3},
    "label_smoothing": 0.1,
}


# what TranslationTask and marian_config read beside what the presets have
OPTIONAL: dict[str, Any] = {
    "model": {"dropout": 0.0},
    "label_smoothing": 0.0,
    "longest": 256,
    "validation": 1_000,
    "beams": 5,
    "bleu_sentences": 1_000,
}


def small(target: float) -> Preset:
    """A model that learns something in seconds: many small steps, few subwords. The batch is in tokens."""
    options = {
        "model": {"layers": 1, "width": 64, "inner": 256, "heads": 4},
        "vocabulary": 1_000,
        "bleu_sentences": 200,
        "longest": 64,
        "validation": 200,
    }
    return Preset(steps=400, batch_size=512, evaluate_every=20, target=target, warmup=20, options=options)


def standard(target: float) -> Preset:
    """About three epochs of Multi30k in a minute on one core. The batch is in tokens."""
    options = {
        "model": {"layers": 1, "width": 128, "inner": 512, "heads": 4},
        "vocabulary": 2_000,
        "label_smoothing": 0.1,
        "longest": 64,
        "validation": 500,
    }
    return Preset(1_200, 1_024, evaluate_every=30, target=target, warmup=100, decay=1e-4, options=options)


def paper(target: float, steps: int, evaluate_every: int, warmup: int, vocabulary: int) -> Preset:
    """The paper's IWSLT14 model and schedule. The batch is in tokens."""
    options = {**PAPER, "vocabulary": vocabulary}
    return Preset(steps, 4096, evaluate_every, target, schedule="inverse-sqrt", warmup=warmup, options=options)


class Corpus(NamedTuple):
    """Sentence pairs as tokens, the subwords, and the text of the test set."""

    tokenizer: Tokenizer
    train: tuple[Tokens, Tokens]
    val: tuple[Tokens, Tokens]
    test: Pairs


def tokenised(train: Pairs, val: Pairs, test: Pairs, paths: Sequence[Path], size: int) -> Corpus:
    """Tokens of all sentences, from the cache where it has them."""

    def make() -> Arrays:
        tokenizer = learn_subwords([*train[0], *train[1]], size)
        arrays: Arrays = {"tokenizer": np.frombuffer(tokenizer.to_str().encode(), np.uint8)}
        for name, text in {"train0": train[0], "train1": train[1], "val0": val[0], "val1": val[1]}.items():
            ids = [np.array(e.ids, np.int32) for e in tokenizer.encode_batch(text)]
            arrays[name], arrays[f"{name}_length"] = np.concatenate(ids), np.array([len(x) for x in ids])
        return arrays

    arrays = cached(paths, "subwords", [size, len(train[0]), len(val[0])], make)

    def sentences(name: str) -> Tokens:
        return np.split(arrays[name], np.cumsum(arrays[f"{name}_length"])[:-1])

    tokenizer = Tokenizer.from_str(arrays["tokenizer"].tobytes().decode())
    return Corpus(tokenizer, (sentences("train0"), sentences("train1")), (sentences("val0"), sentences("val1")), test)


class Sentences(NamedTuple):
    """A padded batch: the source with its end mark, what the decoder sees, and what it should say."""

    source: Tensor
    decoder_input: Tensor
    labels: Tensor

    def to(self, device: torch.device) -> Sentences:
        return Sentences(*(tensor.to(device) for tensor in self))


def open_task(train: Pairs, val: Pairs, test: Pairs, paths: Sequence[Path], preset: Preset) -> TranslationTask:
    """The task of these texts; the option ``validation`` keeps the first pairs of the validation set only."""
    keep = preset.options.get("validation", len(val[0]))
    val = (val[0][:keep], val[1][:keep])
    return TranslationTask(tokenised(train, val, test, paths, preset.options["vocabulary"]), preset)


def pad(sentences: Sequence[np.ndarray[Any, Any]], first: int | None = None) -> Tensor:
    """Sentences with their end marks, padded on the right; ``first`` stands before each in place of the end mark."""
    out = torch.full((len(sentences), max(map(len, sentences)) + 1), PAD, dtype=torch.long)
    for k, ids in enumerate(sentences):
        tokens = torch.from_numpy(ids.astype(np.int64))
        if first is None:
            out[k, : len(ids)], out[k, len(ids)] = tokens, EOS
        else:
            out[k, 0], out[k, 1 : len(ids) + 1] = first, tokens
    return out


def token_batches(pairs: tuple[Tokens, Tokens], limit: int, longest: int) -> list[list[int]]:
    """Batches of sentence pairs of like length, up to ``limit`` tokens with padding on either side."""
    length = [(len(b) + 1, len(a) + 1, k) for k, (a, b) in enumerate(zip(*pairs, strict=True))]
    batches: list[list[int]] = [[]]
    width = 0
    for target, source, k in sorted(x for x in length if max(x[:2]) <= longest):
        width = max(width, target, source)
        if batches[-1] and width * (len(batches[-1]) + 1) > limit:
            batches.append([])
            width = max(target, source)
        batches[-1].append(k)
    return batches


class TranslationTask(Task):
    """``evaluate`` gives the mean negative log-likelihood of a validation token; ``final`` the BLEU of the test set."""

    def __init__(self, corpus: Corpus, preset: Preset) -> None:
        self.corpus, self.options = corpus, preset.options
        self.smoothing = float(preset.options.get("label_smoothing", 0.0))
        self.longest = int(preset.options.get("longest", 256))
        self.batches = token_batches(corpus.train, preset.batch_size, self.longest)
        if not self.batches[0]:
            raise DataError(f"No training sentence has at most {self.longest} tokens: --set longest=NUMBER allows more")

    def model(self) -> nn.Module:
        vocabulary = self.corpus.tokenizer.get_vocab_size()
        return MarianMTModel(marian_config(vocabulary, self.longest, self.options["model"]))

    def _sentences(self, pairs: tuple[Tokens, Tokens], index: Sequence[int]) -> Sentences:
        targets = [pairs[1][k] for k in index]
        return Sentences(pad([pairs[0][k] for k in index]), pad(targets, first=PAD), pad(targets))

    def batch(self, seed: int, step: int) -> Sentences:
        which = int(batch_index(len(self.batches), 1, seed, step))
        return self._sentences(self.corpus.train, self.batches[which])

    def logits(self, model: nn.Module, batch: Sentences) -> Tensor:
        mask = (batch.source != PAD).long()
        return model(input_ids=batch.source, attention_mask=mask, decoder_input_ids=batch.decoder_input).logits

    def loss(self, model: nn.Module, batch: Sentences) -> Tensor:
        batch = batch.to(device_of(model))
        logits, labels = self.logits(model, batch).flatten(0, 1), batch.labels.flatten()
        return F.cross_entropy(logits, labels, ignore_index=PAD, label_smoothing=self.smoothing)

    def evaluate(self, model: nn.Module) -> dict[str, float]:
        total, count = 0.0, 0
        with evaluating(model):
            for index in token_batches(self.corpus.val, 4096, self.longest):
                batch = self._sentences(self.corpus.val, index).to(device_of(model))
                logits, labels = self.logits(model, batch).flatten(0, 1), batch.labels.flatten()
                total += float(F.cross_entropy(logits, labels, ignore_index=PAD, reduction="sum"))
                count += int((labels != PAD).sum())
        return {"loss": total / count, "perplexity": float(np.exp(min(total / count, 50.0)))}

    def translate(self, model: nn.Module, text: Sequence[str]) -> list[str]:
        """Beam search."""
        inner: Any = getattr(model, "module", model)  # a DDP wrapper has no generate
        tokens = [np.array(e.ids[: self.longest - 1], np.int32) for e in self.corpus.tokenizer.encode_batch(list(text))]
        order = sorted(range(len(tokens)), key=lambda k: len(tokens[k]))
        out = [""] * len(tokens)
        with evaluating(model):
            for start in range(0, len(order), 50):
                index = order[start : start + 50]
                source = pad([tokens[k] for k in index]).to(device_of(model))
                made = inner.generate(
                    input_ids=source,
                    attention_mask=(source != PAD).long(),
                    num_beams=int(self.options.get("beams", 5)),
                    max_new_tokens=min(self.longest - 1, 2 * source.shape[1] + 10),
                    use_cache=True,
                )
                for k, said in zip(index, self.corpus.tokenizer.decode_batch(made.tolist()), strict=True):
                    out[k] = said
        return out

    def final(self, model: nn.Module) -> dict[str, float]:
        """BLEU of beam search on the test set, by sacrebleu."""
        count = int(self.options.get("bleu_sentences", len(self.corpus.test[0])))
        said = self.translate(model, self.corpus.test[0][:count])
        return {"bleu": float(BLEU(lowercase=False).corpus_score(said, [self.corpus.test[1][:count]]).score)}


def marian_config(vocabulary: int, longest: int, options: Mapping[str, Any]) -> MarianConfig:
    """One embedding for the source, the target and the output; sinusoidal positions; norms after each block."""
    return MarianConfig(
        vocab_size=vocabulary,
        decoder_vocab_size=vocabulary,
        max_position_embeddings=longest + 1,
        pad_token_id=PAD,
        eos_token_id=EOS,
        bos_token_id=None,
        decoder_start_token_id=PAD,
        forced_eos_token_id=None,
        share_encoder_decoder_embeddings=True,
        tie_word_embeddings=True,
        scale_embedding=True,
        use_cache=False,
        attention_dropout=0.0,
        activation_dropout=0.0,
        encoder_layers=options["layers"],
        decoder_layers=options["layers"],
        d_model=options["width"],
        encoder_ffn_dim=options["inner"],
        decoder_ffn_dim=options["inner"],
        encoder_attention_heads=options["heads"],
        decoder_attention_heads=options["heads"],
        dropout=options.get("dropout", 0.0),
        activation_function="relu",
        init_std=options["width"] ** -0.5,
    )
