"""What must hold for any bytes whatever: the targets that the fuzzer calls.

Each reads its bytes as a file. A FormatError is an answer; any other exception is a fault, and so
is a file that is taken although its promises are broken.
"""

from __future__ import annotations

from mtp_gguf.gguf_tools.errors import FormatError
from mtp_gguf.gguf_tools.files.format import GgufFile, TensorSpec, lay_out
from mtp_gguf.gguf_tools.files.safetensors import read_safetensors
from mtp_gguf.gguf_tools.heads.head import MtpHead, part_of
from support.byte_source import ByteSource

# A reader may slide its window, which is larger than what is fuzzed here, once for each field that
# crosses its edge; it never reads more than it is given.
MOST_READS = 4


def gguf(data: bytes) -> None:
    """A GGUF file that is taken keeps within its bytes and can be written again."""
    source = ByteSource(data)
    try:
        file = GgufFile(source)
    except FormatError as error:
        check_sentence(error)
        return
    finally:
        assert len(source.reads) <= MOST_READS
    end = file.data_offset
    for tensor in file.tensors:
        assert tensor.offset >= end
        assert tensor.offset % file.alignment == file.data_offset % file.alignment == 0
        end = tensor.offset + tensor.nbytes
        assert end <= len(data)
    metadata = {key: file.value(key) for key in file.keys}
    layout = lay_out(metadata, [TensorSpec(t.name, t.shape, t.type) for t in file.tensors])
    content = layout.header + data[file.data_offset :]
    again = GgufFile(ByteSource(content.ljust(layout.size, b"\0")))
    # repr: a NaN is a NaN
    assert repr({key: again.value(key) for key in again.keys}) == repr(metadata)
    assert [(t.name, t.shape, t.type) for t in again.tensors] == [
        (t.name, t.shape, t.type) for t in file.tensors
    ]
    report = MtpHead("bytes", file, file.by_name).report
    assert report.ready or report.reason
    layout_of_draft = report.draft.layout if report.draft else None
    assert all(part_of(t.name, report.block, layout_of_draft) for t in file.tensors)


def safetensors(data: bytes) -> None:
    """A safetensors file that is taken is covered by its tensors, and the reference takes it."""
    try:
        file = read_safetensors(ByteSource(data))
    except FormatError as error:
        check_sentence(error)
        return
    end = 8 + int.from_bytes(data[:8], "little")
    for tensor in file.tensors.values():
        assert tensor.offset == end
        end += tensor.nbytes
    assert end == len(data)
    if b"-0" in data:  # a negative zero, which Python takes for 0 and Rust for a fraction
        return
    import safetensors as reference  # noqa: PLC0415  (it has this function's name)

    named = dict(reference.deserialize(data))  # type: ignore[no-untyped-call]
    assert {n: (t["dtype"], tuple(t["shape"])) for n, t in named.items()} == {
        t.name: (t.dtype, t.shape) for t in file.tensors.values()
    }


def check_sentence(error: FormatError) -> None:
    """A refusal names the source and stays one short sentence."""
    text = str(error)
    assert text.startswith("bytes: ")
    assert len(text) < 2000


TARGETS = {"gguf": gguf, "safetensors": safetensors}
