"""Execute notebooks in place, so that a second execution changes as little as possible.

No timestamps are kept, and no widget views: without a running kernel a stored view only says that its model is gone.
Code is formatted before it runs.
"""

import subprocess
import sys
from pathlib import Path

import nbformat
from nbclient import NotebookClient

WIDGET = "application/vnd.jupyter.widget-view+json"


def execute(path):
    subprocess.run([sys.executable, "-m", "ruff", "format", "--quiet", str(path)], check=True)
    notebook = nbformat.read(path, as_version=4)
    client = NotebookClient(
        notebook, timeout=600, kernel_name="python3", record_timing=False, resources={"metadata": {"path": path.parent}}
    )
    client.execute()
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs = [out for out in cell.outputs if WIDGET not in out.get("data", {})]
            for out in cell.outputs:
                if out.get("name") == "stderr":
                    raise SystemExit(f"{path}: a cell writes to stderr: {out['text'][:200]}")
    nbformat.write(notebook, path)


for name in sys.argv[1:]:
    print(name, flush=True)
    execute(Path(name))
