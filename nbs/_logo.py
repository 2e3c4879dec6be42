"""The logo: a Gaussian bell made of layers, of which the lower ones are frozen. `python nbs/_logo.py` draws nbs/images/logo.svg."""

from math import log, sqrt

from _book import ROOT

FILE = ROOT / "nbs" / "images" / "logo.svg"
FROZEN, TRAINED = "#0072B2", "#E69F00"
SIZE, LAYERS, STILL = 64, 5, 3  # side of the square, layers, how many of them are frozen


def logo() -> str:
    "The drawing: layer i of n is as wide as the bell exp(-x²/2) is at height (i + 1/2)/n."
    pitch, widest = SIZE * 0.88 / LAYERS, sqrt(-2 * log(0.5 / LAYERS))
    bars = []
    for layer in range(LAYERS):
        width = 0.94 * SIZE * sqrt(-2 * log((layer + 0.5) / LAYERS)) / widest
        x, y = (SIZE - width) / 2, SIZE * 0.94 - pitch * (layer + 1) + 1.2
        colour = FROZEN if layer < STILL else TRAINED
        bars.append(f'  <rect x="{x:.2f}" y="{y:.2f}" width="{width:.2f}" height="{pitch - 2.4:.2f}" rx="3" fill="{colour}"/>')
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {SIZE} {SIZE}" role="img" aria-label="dpft">'
    return "\n".join([head, *bars, "</svg>", ""])


if __name__ == "__main__":
    FILE.write_text(logo(), encoding="utf-8")
