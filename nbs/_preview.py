"""How the book reads without Quarto: every chapter as HTML under _preview/, by the pandoc that pypandoc-binary carries."""

import html
import os
import re
import sys
from urllib.parse import quote

import _reference
import pypandoc
from _book import BIBLIOGRAPHY, REFERENCE, ROOT, Chapter, Label, Writer, chapters, outside_code
from _logo import logo

PREVIEW = ROOT / "_preview"


def resolve(text: str, labels: dict[str, Label]) -> str:
    "Cross references as links; citations are left to Pandoc."

    def link(match: re.Match) -> str:
        label = labels.get(match[1])
        return f"[{label.name}]({label.page}#{match[1]})" if label else f"?\\@{match[1]}"

    def change(piece: str) -> str:
        piece = re.sub(rf"\[-?({REFERENCE.pattern})\]", r"\1", piece)
        piece = re.sub(r"\]\((?:[\w.-]+/)*([\w-]+)\.(?:ipynb|qmd)(#[\w-]+)?\)", r"](\1.html\2)", piece)
        return REFERENCE.sub(link, piece)

    return outside_code(text, change)


def contents(book: list[Chapter], current: Chapter) -> str:
    "The list of chapters, with the sections of the one that is read."
    lines, part = [], ""
    for chapter in book:
        if chapter.part != part:
            part = chapter.part
            lines.append(f'<li class="part">{html.escape(part)}</li>' if part else "")
        here = ' class="here"' if chapter is current else ""
        lines.append(f'<li{here}><a href="{chapter.page}"><span>{chapter.number}</span>{html.escape(chapter.title)}</a>')
        if chapter is current:
            items = "".join(f'<li><a href="#{anchor}">{html.escape(title)}</a></li>' for anchor, title in chapter.sections)
            lines.append(f"<ul>{items}</ul>")
        lines.append("</li>")
    return "\n".join(lines)


def page(chapter: Chapter, book: list[Chapter], body: str) -> str:
    "A whole HTML page."
    template = (ROOT / "nbs" / "styles" / "preview.html").read_text(encoding="utf-8")
    fields = {"title": html.escape(chapter.title), "contents": contents(book, chapter), "body": body, "logo": logo(), "icon": quote(logo())}
    return re.sub(r"\{\{(\w+)\}\}", lambda match: fields[match[1]], template)


def body(chapter: Chapter, text: str) -> str:
    "A chapter's Markdown as HTML; pictures keep their place, and the page of references lists everything."
    folder = os.path.relpath(chapter.path.parent, PREVIEW)
    text = re.sub(r"(!\[[^\]]*\]\()(?!https?:|data:|/)", rf"\1{folder}/", text)
    options = ["--mathml", "--citeproc", f"--bibliography={BIBLIOGRAPHY}", "--metadata=link-citations:true", "--wrap=none",
               "--columns=10000"]                                                # so that a table's columns are as wide as their text
    if chapter.path.stem == "references":
        text = f"---\nnocite: '@*'\n---\n\n{text}"
    else:
        options.append("--metadata=reference-section-title:References")
    return pypandoc.convert_text(text, "html5", format="markdown-fancy_lists", extra_args=options)


def preview() -> list[str]:
    "Render every chapter that exists under _preview/; the sentences are references that did not resolve."
    PREVIEW.mkdir(exist_ok=True)
    _reference.write()
    book = [chapter for chapter in chapters() if chapter.path.exists()]
    texts = [Writer(chapter).text() for chapter in book]
    labels = {name: label for chapter in book for name, label in chapter.labels.items()}
    unresolved = []
    for chapter, text in zip(book, texts, strict=True):
        text = resolve(text, labels)
        unresolved += [f"{chapter.path.name}: {name} does not resolve" for name in re.findall(r"\?\\(@[\w-]+)", text)]
        (PREVIEW / chapter.page).write_text(page(chapter, book, body(chapter, text)), encoding="utf-8")
    print(f"{len(book)} chapters under {PREVIEW.name}/; open {PREVIEW.name}/index.html")
    return unresolved


if __name__ == "__main__":
    sentences = preview()
    print(*sentences, sep="\n", file=sys.stderr)
    sys.exit(1 if sentences else 0)
