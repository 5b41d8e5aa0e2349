"""In a Jupyter notebook: a bar while runs train, and figures that the notebook draws. Elsewhere nothing happens."""

import io
import sys
import time
from html import escape
from typing import TYPE_CHECKING, Any

from fedgma.experiments.progress import Progress

if TYPE_CHECKING:
    from matplotlib.figure import Figure

REDRAW_SECONDS = 0.5


def notebook() -> Any:
    """IPython's shell, if this process is the kernel of a notebook; else None."""
    module: Any = sys.modules.get("IPython")
    shell = None if module is None else module.get_ipython()
    return shell if getattr(shell, "kernel", None) is not None else None


class NotebookBar:
    """A bar in the output of a notebook's cell; needs no widgets."""

    def __init__(self, progress: Progress) -> None:
        from IPython.display import display  # type: ignore[import-not-found, unused-ignore]

        self._progress = progress
        self._drawn = time.monotonic()
        self._handle: Any = display(_bundle(progress), raw=True, display_id=True)

    def update(self) -> None:
        """Draw it again, at most twice a second, and after the last round."""
        now = time.monotonic()
        if now - self._drawn >= REDRAW_SECONDS or self._progress.done >= self._progress.total:
            self._drawn = now
            self._handle.update(_bundle(self._progress), raw=True)


def _bundle(progress: Progress) -> dict[str, str]:
    """The bar as text and as HTML, for notebooks of any kind."""
    bar = f'<progress value="{progress.done}" max="{progress.total}"></progress>'
    return {"text/plain": progress.text, "text/html": f"{bar} {escape(progress.text)}"}


def shown(figure: "Figure") -> "Figure":
    """The figure; a notebook that cannot draw figures yet, because pyplot was not imported, can do so from now on."""
    if (shell := notebook()) is not None:
        pictures = shell.display_formatter.formatters["image/png"]
        if type(figure) not in pictures:
            pictures.for_type(type(figure), _png)
    return figure


def _png(figure: "Figure") -> bytes:
    out = io.BytesIO()
    figure.savefig(out, format="png", dpi=110)
    return out.getvalue()
