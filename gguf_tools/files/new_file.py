"""Name, write and check the GGUF that a request makes of others."""

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import unquote

from ..doctor import value_findings
from ..hub.remote import is_remote
from ..hub.sources import StreamedSource
from ..model import Model, open_model, whole_name
from ..progress import QUIET, Progress
from .output import check_output
from .rewrite import OutputSpec, write


def output_path(output: Path | None, source: Path | Model, pattern: str) -> Path:
    """Return the file to write: `output`, or a default name in that folder or the current one.

    pattern: the default name, with `{}` in place of the source's name without suffix.
    """
    if output is not None and not output.is_dir():
        return output
    if isinstance(source, Model):
        text = str(source.path)
        source = Path(unquote(text)) if is_remote(text) else Path(text)
    return (output or Path()) / f"{pattern.format(Path(whole_name(source)).stem)}.gguf"


def local_files(*models: Model) -> list[Path]:
    """Return the local files of some models; those of remote models are left out."""
    return [path for model in models if not is_remote(str(model.path)) for path in model.paths]


def write_file(
    title: str,
    spec: OutputSpec,
    output: Path,
    sources: Sequence[Path],
    overwrite: bool,
    progress: Progress = QUIET,
) -> None:
    """Check that `output` may be written, then write it and report progress.

    sources: the local files that the output must not replace.
    """
    check_output(output, list(sources), overwrite)
    if any(isinstance(tensor.source, StreamedSource) for tensor in spec.tensors):
        title = f"download and {title}"
    with progress.count(title, spec.nbytes) as advance:
        write(output, spec, advance)


def head_warnings(output: Path) -> list[str]:
    """Return what doctor would say about the values of the head in a written GGUF."""
    with open_model(output) as model:
        return [f.text for f in value_findings(model)] if model.head.report.ready else []
