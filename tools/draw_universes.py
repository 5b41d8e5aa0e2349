"""Draw the universes of the multiverse (C19, C24) and write them to the package; the draw was made before any run.

python tools/draw_universes.py
"""

from pathlib import Path

from fedgma.paper import universes

FILE = Path(universes.__file__).with_name(universes.FILE)

if __name__ == "__main__":
    FILE.write_text(universes.written(universes.draw()), encoding="utf-8")
