"""Fuzz the reader of exports with atheris: pip install atheris; python scripts/fuzz/export.py -max_total_time=60.

The first bytes choose the file; the rest becomes its content. Anything but an ExportError is a finding.
"""

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["ag.gates.export", "ag.gates.folder", "ag.gates.manifest"]):
    from ag.config.gate import GateConfig
    from ag.gates import export
    from ag.gates.gate import AttentionGates

GEOMETRY = {"model_type": "llama", "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "head_dim": 4}
GEOMETRY |= {"hidden_size": 8, "windowed_layers": []}
FOLDER = Path(tempfile.mkdtemp()) / "export"
export.save(FOLDER, AttentionGates(GEOMETRY, GateConfig(num_heads=1, head_dim=2)))
WHOLE = {name: (FOLDER / name).read_bytes() for name in ("gate_config.json", "gates.safetensors")}


def one_input(data: bytes) -> None:
    """Replace a part of one file, and load."""
    provider = atheris.FuzzedDataProvider(data)
    name = provider.PickValueInList(sorted(WHOLE))
    start = provider.ConsumeIntInRange(0, len(WHOLE[name]))
    end = provider.ConsumeIntInRange(start, len(WHOLE[name]))
    for other, content in WHOLE.items():
        (FOLDER / other).write_bytes(content)
    (FOLDER / name).write_bytes(WHOLE[name][:start] + provider.ConsumeBytes(4096) + WHOLE[name][end:])
    try:
        AttentionGates.from_pretrained(FOLDER)
    except export.ExportError:
        return


atheris.Setup(sys.argv, one_input)
atheris.Fuzz()
