"""Writes ``hires/data/digits.npz`` from scikit-learn's copy of the digits.

python scripts/make_digits.py    (pip install scikit-learn)
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

PLACE = Path(__file__).resolve().parents[1] / "hires" / "data" / "digits.npz"


def main() -> None:
    """Writes the file: images (1797, 8, 8) from 0 to 16, labels (1797,)."""
    from sklearn.datasets import load_digits

    held = load_digits()
    images = held.images.astype(np.uint8)
    assert (images == held.images).all()
    np.savez_compressed(PLACE, images=images, labels=held.target.astype(np.uint8))
    print(f"{PLACE}: {PLACE.stat().st_size} bytes")


if __name__ == "__main__":
    main()
