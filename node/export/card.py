"""The model card of an export, `README.md`: where the model comes from, and how to load it."""

from __future__ import annotations

import math

from node.config.task_tables import GptTable
from node.export.trained_model import TrainedModel
from node.tasks.extra import trained_elements

MODEL = "model.safetensors"


def card(model: TrainedModel, merge: bool = False, on_hub: str = "") -> str:
    """`README.md` of the model: where it comes from, and how to load it."""
    manifest = model.manifest
    config, count = manifest.config, sum(trained_elements(each.layout) for each in model.checkpoints)
    loss, unit = model.held_out_loss, " nats per byte" if config.gpt else ""
    name, called = _plain(config.name) or "starling", _plain(manifest.model.base if manifest.model else "")
    rows = {
        "run": f"{name}, `{manifest.run_id}`",
        "founder": f"`{manifest.founder.peer}`",
        "task": f"`{config.task}`",
        "rounds": f"{model.rounds[0]} of {config.recipe.rounds}",
        **_origins(model),
        **({"base": f"{called}, weights `{manifest.model.weights[:16]}`"} if manifest.model else {}),
        "held-out loss": f"{loss:.4f}{unit}" if math.isfinite(loss) else "not measured",
        "parameters": f"{count:,}, float32",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    head = "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [starling, llama]\n---\n\n"
    about = f"# {name}\n\n{_ABOUT}\n\n| | |\n|---|---|\n{table}\n\n"
    if config.hf and manifest.model:
        is_adapter = config.hf.train == "lora" and not merge
        return about + (_loading_adapter(on_hub, called) if is_adapter else _loading_whole())
    return (head if config.gpt else "") + about + _loading(config.own_task, config.gpt)


def _plain(text: str) -> str:
    """A founder's text without what has a meaning in Markdown."""
    return "".join(each for each in text if each.isalnum() or each in " -_./@").strip()


def _origins(model: TrainedModel) -> dict[str, str]:
    lineages = [f"`{checkpoint.lineage.hex()}`" for checkpoint in model.checkpoints]
    if model.manifest.stages is None:
        return {"lineage": lineages[0]}
    rounds = "" if model.is_of_one_round else ", after {} rounds"
    return {
        f"lineage of stage {stage}": lineage + rounds.format(model.rounds[stage])
        for stage, lineage in enumerate(lineages)
    }


_ABOUT = "Trained by the peers of a Starling run: volunteers' machines, without a central server."


def _loading_whole() -> str:
    return (
        "```python\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'folder = "."  # this one\n'
        "tokenizer = AutoTokenizer.from_pretrained(folder)\n"
        "model = AutoModelForCausalLM.from_pretrained(folder)\n"
        "```\n"
    )


def _loading_adapter(on_hub: str, called: str) -> str:
    """How to load an adapter: its base is on the hub, or in a folder that each user has elsewhere."""
    name, _, revision = on_hub.partition("@")
    where = f'base = "{name}"' if name else 'base = "PATH/OF/THE/BASE"  # its folder on your machine'
    at = f', revision="{revision}"' if revision else ""
    return (
        f"These are adapters: they need their base, the model `{called}` with the weights named above.\n\n"
        "```python\n"
        "from peft import PeftModel\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f"{where}\n"
        'folder = "."  # this one\n'
        f"tokenizer = AutoTokenizer.from_pretrained(base{at})\n"
        f"model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base{at}), folder)\n"
        "```\n"
    )


def _loading(own_task: str, gpt: GptTable | None) -> str:
    if gpt:
        return (
            f"A language model over bytes: a token is a byte, and the context is {gpt.context} bytes. It has no\n"
            "tokens for the beginning or the end of a text.\n\n"
            "```python\n"
            "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
            'tokenizer = AutoTokenizer.from_pretrained(".")\n'
            'model = AutoModelForCausalLM.from_pretrained(".")\n'
            'prompt = tokenizer("def ", return_tensors="pt")\n'
            "print(tokenizer.decode(model.generate(**prompt, do_sample=True, max_new_tokens=100)[0]))\n"
            "```\n"
        )
    module = f"the module that `{own_task}` makes" if own_task else "the task"
    return (
        f"`{MODEL}` contains the trained parameters of {module}, and the buffers that training changes,\n"
        "under their own names.\n\n"
        "```python\n"
        "from safetensors.torch import load_file\n\n"
        f'module.load_state_dict(load_file("{MODEL}"), strict=False)\n'
        "```\n"
    )
