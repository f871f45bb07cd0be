"""`mtp-gguf train-head`."""

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from mtp_gguf.gguf_tools.heads.acceptance import LEAST
from mtp_gguf.gguf_tools.machine.shell import quoted
from mtp_gguf.train.options import (
    EPOCHS,
    GPU_LAYERS,
    LEAST_MINUTES,
    LEAST_RATE,
    LENGTH,
    RANK,
    SEED,
    STEPS,
    TOKENS,
)

from . import options
from .console import CONSOLE
from .file_report import file_fields, report_file
from .progress import reports_errors


@reports_errors
def train_head(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="GGUF whose trunk will run (any shard); also OWNER/NAME:QUANT on the hub.",
        ),
    ],
    text: Annotated[list[Path] | None, options.text_option("Train on these text files.")] = None,
    prompts: Annotated[
        list[Path] | None,
        options.prompt_files_option(
            "Train on the model's answers to the prompts in these files, separated by blank lines. "
            "With --text, too, answers and pieces of text are interleaved."
        ),
    ] = None,
    output: Annotated[
        Path | None,
        options.output_option(
            "Write to this GGUF, or to this .safetensors file, which gets mtp.* tensors "
            "(default: MODEL-tuned.gguf).",
            options.parse_output,
        ),
    ] = None,
    head_from: Annotated[
        str | None,
        options.head_option(
            "--head-from",
            metavar="MODEL",
            help="Start from this head: a GGUF, or a checkpoint (folder, OWNER/NAME).",
        ),
    ] = None,
    from_scratch: Annotated[
        bool,
        options.head_option("--from-scratch", help="Start from random weights."),
    ] = False,
    mtp_f16: options.MtpF16 = False,
    mtp_type: Annotated[
        str | None,
        options.head_type_option(
            "Store the head's matrices in this type (default: that of MODEL's head, or Q8_0)."
        ),
    ] = None,
    head_only: Annotated[
        bool,
        options.head_option(
            "--head-only",
            help="Write only the head, to use with --head.",
        ),
    ] = False,
    fastmtp: options.FastMtp = None,
    minutes: Annotated[
        float | None,
        typer.Option(
            "--minutes",
            min=LEAST_MINUTES,
            help="Finish in about N minutes (default: when the held-out loss stops falling).",
        ),
    ] = None,
    tokens: Annotated[
        int, typer.Option("--tokens", min=TOKENS.least, help="Train on at most N tokens.")
    ] = TOKENS.default,
    length: Annotated[
        int,
        typer.Option(
            "--length",
            min=LENGTH.least,
            max=LENGTH.most,
            help="Cut texts into pieces of N tokens; a prompt with its answer has at most N.",
        ),
    ] = LENGTH.default,
    raw: options.Raw = False,
    steps: Annotated[
        int,
        typer.Option(
            "--steps", min=STEPS.least, max=STEPS.most, help="Train drafts of up to N tokens."
        ),
    ] = STEPS.default,
    epochs: Annotated[
        float,
        typer.Option("--epochs", min=EPOCHS.least, help="Train on each token at most N times."),
    ] = EPOCHS.default,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate",
            min=LEAST_RATE,
            help="Highest learning rate (default: 0.16 / sqrt(width of the model) for random "
            "weights, down to a twentieth of that for a head that is always right).",
        ),
    ] = None,
    rank: Annotated[
        int,
        typer.Option(
            "--rank",
            min=RANK.least,
            help="Train low-rank changes (LoRA) of this rank; 0: all weights.",
        ),
    ] = RANK.default,
    seed: Annotated[
        int, typer.Option("--seed", min=SEED.least, max=SEED.most, help="Seed all random numbers.")
    ] = SEED.default,
    device: Annotated[
        str | None,
        typer.Option("--device", help="Train on this PyTorch device (default: a GPU, or cpu)."),
    ] = None,
    threads: options.Threads = None,
    gpu_layers: options.GpuLayers = GPU_LAYERS.default,
    work: Annotated[
        Path | None,
        typer.Option(
            "--work",
            metavar="FOLDER",
            help="Keep the trunk's states and checkpoints here (default: OUTPUT.train, removed "
            "at the end).",
        ),
    ] = None,
    overwrite: options.Overwrite = False,
    no_check: options.NoCheck = False,
    chart: Annotated[
        Path | None,
        typer.Option(
            "--chart",
            metavar="FILE",
            parser=options.parse_output,
            help="Draw what is accepted as training goes on into this PNG.",
        ),
    ] = None,
    least_acceptance: options.LeastAcceptance = LEAST,
    as_json: options.AsJson = False,
) -> None:
    """Train the MTP head of a GGUF for its trunk, quantized as it is.

    The trunk reads your texts, or answers your prompts (which is the better data), and its states
    are kept on disk. The head learns to predict what this trunk says, several tokens ahead. Use it
    for a fine-tune with the head of its base model, for a trunk that lost its head, for strong
    quantization, and for small draft vocabularies. The trunk's tensors are not changed.

    Qwen2, Qwen3 and Llama models have no heads in llama.cpp; for them the output is a carrier
    (`mtp-gguf carry`) with a new head.

    An interrupted run continues where it stopped if the same command is run again.
    docs/train.md says how much text and time it takes, and when it cannot help.

    **Examples**

    mtp-gguf train-head model.gguf --text src/*.py -o model-tuned.gguf

    mtp-gguf train-head finetune.gguf --head-from Qwen/Qwen3.5-4B -f prompts.txt --minutes 60

    mtp-gguf train-head headless.gguf --from-scratch --text notes/*.md --fastmtp 16384

    mtp-gguf train-head qwen2.5.gguf --text src/*.py -f prompts.txt --minutes 120
    """
    from mtp_gguf.native.crashes import tell_crashes  # noqa: PLC0415
    from mtp_gguf.train.api import let_threads_sleep  # noqa: PLC0415
    from mtp_gguf.train.api import train_head as train  # noqa: PLC0415

    let_threads_sleep()
    tell_crashes()  # loads llama.cpp
    result = train(
        model,
        output,
        text=text or (),
        prompts=prompts or (),
        head_from=head_from,
        from_scratch=from_scratch,
        mtp_f16=mtp_f16,
        mtp_type=mtp_type,
        head_only=head_only,
        fastmtp=fastmtp,
        minutes=minutes,
        tokens=tokens,
        length=length,
        raw=raw,
        steps=steps,
        epochs=epochs,
        rate=rate,
        rank=rank,
        seed=seed,
        device=device,
        threads=threads,
        gpu_layers=gpu_layers,
        work=work,
        overwrite=overwrite,
        no_check=no_check,
        chart=chart,
        least_acceptance=least_acceptance,
        progress=CONSOLE,
    )
    if as_json:
        head = file_fields(result.path) if result.is_gguf else {"path": str(result.path)}
        fields = {
            **head,
            **result.figures,
            "stored_acceptance": result.acceptance.fields() if result.acceptance else None,
            "warnings": result.warnings,
        }
        typer.echo(json.dumps(fields, indent=1))
        return
    for line in _report(result.figures):
        typer.echo(line)
    if result.is_gguf:
        report_file(result.path, None if head_only else "mtp-gguf tune {}")
        if result.acceptance:
            typer.echo(result.acceptance.text)
            if result.acceptance.warning:
                typer.echo(f"warning: {result.acceptance.warning}")
    else:
        typer.echo(f"{result.path}: mtp.* tensors; put it beside the checkpoint's config.json")
    if result.kept:
        typer.echo(f"kept: {quoted(result.kept)}")


def _report(fields: dict[str, Any]) -> list[str]:
    """Return the lines on acceptance and speed."""
    lines = []
    for when in ("before", "after"):
        if rates := fields["acceptance"][when]:
            shown = " / ".join(f"{rate:.0%}" for rate in rates)
            lines.append(f"accepts {when} training: {shown} of drafts 1 / 2 / … (greedy)")
    lines.append(
        f"trained {fields['steps']} steps on {fields['tokens']} tokens in "
        f"{fields['seconds'] / 60:.1f} min, best at step {fields['best_step']}: {fields['stopped']}"
    )
    if speed := fields["predicted_speedup"]:
        lines.append(
            f"predicted speed on this machine: {speed['after']:.2f} times that without drafting"
            + (f" (before: {speed['before']:.2f})" if speed["before"] else "")
            + f", at depth {speed['depth']}"
        )
    if replaced := fields["replaced_draft_vocabulary"]:
        lines.append(f"replaced the draft vocabulary of {replaced} tokens, as --fastmtp asks")
    lines += [f"warning: {warning}" for warning in fields["warnings"]]
    if not fields["improved"]:
        lines.append("note: nothing was gained, so the head is the one that training started from")
    return lines
