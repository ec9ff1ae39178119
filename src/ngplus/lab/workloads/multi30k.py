"""Multi30k, German captions to English, with a Transformer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from ngplus.lab.workloads.base import Preset, Workload
from ngplus.lab.workloads.files import folder
from ngplus.lab.workloads.translation import OPTIONAL, TranslationTask, open_task, paper, read_pair, small, standard

HELP = """Get Multi30k's task 1 from https://github.com/multi30k/dataset (data/task1/raw) and lay it out as
  DATA/multi30k/train.de.gz, train.en.gz, val.de.gz, val.en.gz, test_2016_flickr.de.gz, test_2016_flickr.en.gz
one sentence a line, gzipped or not."""


class Multi30k(Workload):
    name = "multi30k"
    title = "Multi30k German-English, Transformer"
    measure = "loss"  # nats for each validation token
    higher_is_better = False
    optional: ClassVar[Mapping[str, Any]] = OPTIONAL
    presets: ClassVar[Mapping[str, Preset]] = {
        "small": small(target=3.67),
        "standard": standard(target=2.278),
        # The paper has no Multi30k; this is its IWSLT14 model, with a vocabulary for 29,000 captions.
        "paper": paper(target=1.60, steps=10_000, evaluate_every=200, warmup=1_000, vocabulary=8_000),
    }

    def open(self, preset: Preset, data: Path | None) -> TranslationTask:
        source, languages = folder(self.name, data, HELP), ("de", "en")
        train, paths = read_pair(source, "train", languages=languages)
        val, more = read_pair(source, "val", languages=languages)
        test, _ = read_pair(source, "test_2016_flickr", "test", languages=languages)
        return open_task(train, val, test, paths + more, preset)
