"""Load exported models by transformers and peft alone, in a process of its own, and compare what they compute.

    python load_again.py JOB.json …      # of `node.export.checking`, which reads the answers: a line of JSON for each

This file imports nothing of Starling, so that an export that needs it is noticed.
"""

from __future__ import annotations

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

TOLERANCE = 1e-4  # largest difference of logits in float32, times the largest logit if that is above 1
MAX_PROBLEM_CHARACTERS = 200


def problem(job: dict[str, Any]) -> str:
    """What is wrong with an export; empty if nothing is."""
    try:
        return _differing_tensors(job) if "tensors" in job else _differing_logits(job)
    except Exception as error:  # noqa: BLE001  (of the libraries: whatever it is, the export cannot be used)
        return " ".join(f"it cannot be loaded: {type(error).__name__}: {error}".split())[:MAX_PROBLEM_CHARACTERS]


def digest(tensor: torch.Tensor) -> str:
    content = (
        tensor.detach().contiguous().view(torch.uint8) if tensor.dim() else tensor.detach()[None].view(torch.uint8)
    )
    return hashlib.sha256(repr(tuple(tensor.shape)).encode() + content.numpy().tobytes()).hexdigest()


def _differing_tensors(job: dict[str, Any]) -> str:
    found = {name: digest(each) for name, each in load_file(Path(job["folder"]) / "model.safetensors").items()}
    differing = sorted(name for name in found.keys() | job["tensors"] if found.get(name) != job["tensors"].get(name))
    return f"{len(differing)} tensors differ from the run's, such as {differing[0]}" if differing else ""


@torch.no_grad()
def _differing_logits(job: dict[str, Any]) -> str:
    import transformers

    options: dict[str, Any] = {"dtype": torch.float32, "trust_remote_code": False, "local_files_only": True}
    load = transformers.AutoModelForCausalLM.from_pretrained
    if job["base"]:
        import peft

        model: Any = peft.PeftModel.from_pretrained(load(job["base"], **options), job["folder"])
    else:
        found: Any = load(job["folder"], output_loading_info=True, **options)
        model, info = found
        for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"):
            if names := sorted(map(str, info[kind])):
                return f"transformers reports {len(names)} {kind.replace('_', ' ')}, such as {names[0]}"
    wanted = load_file(job["expected"])
    logits = model.eval()(input_ids=wanted["ids"], use_cache=False).logits.float()
    if logits.shape != wanted["logits"].shape:
        return f"its logits have the shape {tuple(logits.shape)}, the run's model {tuple(wanted['logits'].shape)}"
    gap, scale = float((logits - wanted["logits"]).abs().max()), max(1.0, float(wanted["logits"].abs().max()))
    if not gap <= TOLERANCE * scale:
        return f"its logits differ by {gap:.2g} from those of the run's model, more than {TOLERANCE * scale:.2g}"
    if job["text"]:
        tokenizer = transformers.AutoTokenizer.from_pretrained(job["folder"], local_files_only=True)
        if tokenizer(job["text"], verbose=False)["input_ids"] != job["tokens"]:
            return "its tokenizer makes other tokens of a text than the run's"
    return ""


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(json.dumps({"problem": problem(json.loads(Path(name).read_text(encoding="utf-8")))}), flush=True)
