"""The site as Quarto leaves it, finished (`finish`) and looked over (`check`).

`finish` runs after each render. It takes out what asks a third party for something (the scripts that Quarto adds where a table is stored
as HTML), gives each figure the size that it was drawn in and, where it has no alternative text, its caption for one, gives the controls of
the frame the names and roles that a screen reader needs, lets keys reach wide tables, keeps a full stop beside the formula before it and
the bars of a norm as low as their line, links the references in docstrings, lets terms of the glossary be led to, folds long proofs and
optional sections, and leaves the search index one spelling of each formula.

`check` finds broken links, references that did not resolve, requests to third parties and pictures without alternative text; in a headless
Chromium, where there is one, also code of usual width that must be scrolled at 1280 px and pages that scroll sideways at 390 px.

`axe path/to/axe.min.js [page …]` asks axe-core, which this repository does not hold (`npm install axe-core` fetches it), what keeps people
from using the pages, in the light and in the dark theme; it fails on what axe calls critical or serious."""

import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import ClassVar
from urllib.parse import unquote, urlsplit

from _book import CITATION, REFERENCE, ROOT, chapters

SITE = ROOT / "_docs"
WIDE, NARROW = 1280, 390  # a small laptop and a telephone, in pixels
LONG = 300  # letters of a proof, about three lines; what is longer folds
STACKED = 4  # columns of a table whose rows are lists on a telephone
INCH = 112  # pixels on the page for an inch of a figure: 9-point letters are then 14 px high beside text of 18 px
LOOKED_AT = ("index.html", "nbs/1_learn/01_first.html", "nbs/1_learn/03_step.html", "nbs/1_learn/05_budget.html",
             "nbs/2_methods/11_frost_measure.html", "nbs/3_found/20_which_method.html", "nbs/3_found/26_cost.html",
             "nbs/3_found/29_claims.html", "nbs/4_howto/30_csv.html", "nbs/5_built/45_errata.html", "nbs/5_built/glossary.html",
             "nbs/source/engine.html")  # what axe looks at where no page is named

SCRIPTS = re.compile(r"""<script\b[^>]*\bsrc=["'](?:https?:)?//[^>]*>\s*</script>\s*"""
                     r"""|<script[^>]*>define\('jquery'.*?</script>\s*""", re.DOTALL)
FIGURE = re.compile(r"<figure\b.*?</figure>", re.DOTALL)
CAPTION = re.compile(r"<figcaption\b[^>]*>(.*?)</figcaption>", re.DOTALL)
IMAGE = re.compile(r"<img\b[^>]*>")
FORMULA = re.compile(r"<math\b.*?</math>", re.DOTALL)
STOPPED = re.compile(r"(<math\b[^>]*display=\"inline\"(?:(?!</math>).)*</math>)([.,;:!?)’”]+)", re.DOTALL)
NUMBER = re.compile(r"(?:[\d\s.,()%±+−–×∞]| to ){1,24}")  # and its interval, in a table
FENCED = re.compile(r"<mrow><mo stretchy=\"true\" form=\"prefix\">(‖|\||\(|\[)</mo>((?:(?!stretchy=\"true\").)*?)"
                    r"<mo stretchy=\"true\" form=\"postfix\">(‖|\||\)|\])</mo></mrow>", re.DOTALL)
ACCENT = re.compile(r"<mover>(<mi\b[^>]*>[^<]*</mi>)<mo accent=\"true\">[^<]*</mo></mover>")
TALL = re.compile(r"<(?:mfrac|munder|mover|munderover|mtable|msqrt|mroot)\b")
ANNOTATION = re.compile(r"<annotation\b[^>]*>(.*?)</annotation>", re.DOTALL)
TAG = re.compile(r"<[^>]+>")
CODE = re.compile(r"<pre class=\"sourceCode.*?</pre>", re.DOTALL)
PROOF = re.compile(r"(<div class=\"proof\">\s*)<p><span class=\"proof-title\">(.*?)</span>", re.DOTALL)
SECTION = re.compile(r"<section\b([^>]*)>\s*<h([23])\b[^>]*>(.*?)</h\2>(?:\s*<p>.*?</p>)?", re.DOTALL)

# What is folded opens where the address or a search leads into it, and on paper.
UNFOLD = """<script id="unfold">(() => {
  const open = (one) => {
    for (let at = one; at; at = at.parentElement) {
      if (at.tagName === "DETAILS") at.open = true;
      if (at.matches(".callout-collapse:not(.show)")) {
        at.classList.add("show");
        document.querySelector(`[aria-controls="${at.id}"]`)?.setAttribute("aria-expanded", "true");
      }
    }
  };
  const follow = () => {
    const one = location.hash && document.getElementById(decodeURIComponent(location.hash.slice(1)));
    if (one && one.closest("main details, main .callout-collapse")) { open(one); one.scrollIntoView(); }
  };
  let closed = [];
  addEventListener("hashchange", follow);
  addEventListener("load", () => { follow(); document.querySelectorAll("main mark").forEach(open); });
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("main details:not([open])")];
    for (const one of closed) one.open = true;
  });
  addEventListener("afterprint", () => { for (const one of closed) one.open = false; });
})();</script>
"""


# ---- finish


def without_scripts(page: str) -> str:
    "Scripts of others: nothing here needs them."
    return SCRIPTS.sub("", page)


def text_of(markup: str) -> str:
    "What a reader reads: a formula once, no tags, single spaces."
    return " ".join(html.unescape(TAG.sub("", ANNOTATION.sub("", markup))).split())


def with_alt(page: str) -> str:
    "Every picture of a figure says in words what it shows: its own words, else its caption."

    def figure(match: re.Match) -> str:
        caption = CAPTION.search(match[0])
        words = html.escape(re.sub(r"^(Figure|Table)\s[\w.]+:\s*", "", text_of(caption[1]))) if caption else ""

        def image(tag: re.Match) -> str:
            if not words or re.search(r"""\balt=["'][^"']""", tag[0]):
                return tag[0]
            return re.sub(r"""\salt=(["'])\1""", "", tag[0]).replace("<img", f'<img alt="{words}"', 1)

        return IMAGE.sub(image, match[0])

    return FIGURE.sub(figure, page)


def inches(picture: Path) -> float | None:
    "How wide a PNG was drawn, where it says how many pixels make a metre."
    head = picture.read_bytes()[:4096] if picture.suffix == ".png" and picture.exists() else b""
    density = head.find(b"pHYs")
    if density < 0 or head[density + 12] != 1:                                     # 1: the unit is the metre
        return None
    pixels, metre = (int.from_bytes(head[at : at + 4], "big") for at in (16, density + 4))
    return pixels / (metre * 0.0254) if metre else None


def with_sizes(page: str, folder: Path) -> str:
    "Letters are as large in a narrow figure as in a wide one: each is as wide as it was drawn, or as its column."

    def sized(tag: re.Match) -> str:
        source = re.search(r'\bsrc="([^":]+)"', tag[0])
        width = inches(folder / unquote(source[1])) if source and "figure-img" in tag[0] and "style=" not in tag[0] else None
        return tag[0].replace("<img", f'<img style="width:{round(width * INCH)}px"', 1) if width else tag[0]

    return IMAGE.sub(sized, page)


def with_named_controls(page: str) -> str:
    "The frame as a screen reader tells it: links are called what they show, what folds is a button, each landmark has its own name."
    page = re.sub(r'(<a\b[^>]*class="pagination-link") aria-label="[^"]*"', r"\1", page)
    page = re.sub(r'<div class="callout-header[^>]*data-bs-toggle="collapse"[^>]*>', lambda tag: re.sub(
        r' aria-label="[^"]*"', "", tag[0]).replace(" data-bs-toggle", ' role="button" tabindex="0" data-bs-toggle', 1), page)
    page = re.sub(r'<a\b[^>]*role="navigation"', lambda tag: tag[0].replace('role="navigation"', 'role="button"'), page)
    names = {r'(<a\b[^>]*class="sidebar-logo-link")>': "First page", r'(<nav id="quarto-sidebar"[^>]*)>': "Chapters",
             r'(<nav class="page-navigation")>': "Before and after", r'(<nav class="quarto-secondary-nav")>': "This page"}
    for pattern, name in names.items():
        page = re.sub(pattern, rf'\1 aria-label="{name}">', page)
    return re.sub(r'(quarto-title-breadcrumbs[^>]*aria-label="breadcrumb)"', r'\1 of the title"', page)


def with_reachable_tables(page: str) -> str:
    "A wide table scrolls sideways, so keys must reach it; on a telephone rows are lists, each value after its column's name."
    def reachable(table: re.Match) -> str:
        head, _, rows = table[0].replace("<table", '<table tabindex="0"', 1).partition("</tr>")
        names = [html.escape(text_of(name)) for name in re.findall(r"<th\b[^>]*>(.*?)</th>", head, re.DOTALL)]
        if len(names) < STACKED:
            return f"{head}</tr>{rows}"

        def named(row: re.Match) -> str:
            columns = iter(names)
            return re.sub(r"<td\b", lambda cell: f'<td data-name="{next(columns, "")}"', row[0])

        return f'<div class="stacks">{head}</tr>{re.sub("<tr.*?</tr>", named, rows, flags=re.DOTALL)}</div>'
    return re.sub(r"<table\b.*?</table>", reachable, page, flags=re.DOTALL)


def with_whole_numbers(page: str) -> str:
    "A number in a table stays on one line with its interval, and so does one in a sentence."
    def marked(cell: re.Match) -> str:
        return f'<td class="number"{cell[1]}>{cell[2]}</td>' if NUMBER.fullmatch(text_of(cell[2])) else cell[0]
    page = re.sub(r"<td((?: (?!class=)[^>]*)?)>([^<]+)</td>", marked, page)
    return re.sub(r"(?<=\d) ± (?=\d)", "\u00a0±\u00a0", page)


def with_marks_for_style(page: str) -> str:
    "What the style sheet must know: the line that says how long a chapter runs, and answers, whose output folds with their code."
    page = page.replace("<p><em>Runs in about", '<p class="takes"><em>Runs in about')
    return re.sub(r'class="cell"(>\s*<details class="code-fold">\s*<summary>Answer</summary>)', r'class="cell answer"\1', page)


def with_stops(page: str) -> str:
    "A stop or a bracket stays on the line of the formula before it."
    return STOPPED.sub(r'<span class="with-stop">\1\2</span>', page)


def with_low_fences(page: str) -> str:
    "The bars of a norm around one line, accents included, stay as high as the line; around a fraction or a sum they grow."

    def fence(match: re.Match) -> str:
        return match[0] if TALL.search(ACCENT.sub(r"\1", match[2])) else match[0].replace('stretchy="true"', 'stretchy="false"')

    for _ in range(3):                                                             # from the inside out
        page = FENCED.sub(fence, page)
    return page


def with_letters(page: str) -> str:
    "A script l is a letter and not an operator; an accent that combines would stand beside its letter, its spacing form stands above."
    for drawn, meant in (("<mo>ℓ</mo>", "<mi>ℓ</mi>"), (">\u0303</mo>", ">\u02dc</mo>"), (">\u0302</mo>", ">\u02c6</mo>")):
        page = page.replace(drawn, meant)
    return page


def with_links(page: str, labels: dict[str, str], here: str, cited: set[str]) -> str:
    "`@lem-…` and `@author2020` in code lead to what they name."

    def to(match: re.Match) -> str:
        name = match[1]
        if name in labels:
            target, title = f"{labels[name]}#{name}", "where it stands"
        elif name in cited:
            target, title = f"references.html#ref-{name}", "in the references"
        else:
            return match[0]
        return f'<a href="{os.path.relpath(target.split("#")[0], Path(here).parent)}#{target.split("#")[1]}" title="{title}">@{name}</a>'

    return CODE.sub(lambda code: CITATION.sub(to, REFERENCE.sub(to, code[0])), page)


def end_of(page: str, begin: int, tag: str) -> int:
    "Where the element that begins there is closed."
    depth = 0
    for found in re.compile(rf"<(/?){tag}\b[^>]*>").finditer(page, begin):
        depth += -1 if found[1] else 1
        if not depth:
            return found.start()
    raise ValueError(f"a <{tag}> is not closed: {page[begin : begin + 80]}")


def with_folds(page: str) -> str:
    "Long proofs are folded, and so are sections of the class `folded` or called optional, below their first paragraph."
    def folded(begin: int, rest: int, end: int, summary: str, opening: str = "") -> str:
        return f'{page[:begin]}<details class="folded"><summary>{summary}</summary>\n{opening}{page[rest:end]}</details>\n{page[end:]}'

    for proof in reversed([*PROOF.finditer(page)]):
        end = end_of(page, proof.start(), "div")
        if len(text_of(page[proof.end() : end])) > LONG:
            page = folded(proof.end(1), proof.end(), end, text_of(proof[2]).rstrip("."), "<p>")
    for section in reversed([*SECTION.finditer(page)]):
        if re.search(r'class="[^"]*\bfolded\b', section[1]) or re.match(r"[\d. ]*Optional: ", text_of(section[3])):
            page = folded(section.end(), section.end(), end_of(page, section.start(), "section"), "Show this section")
    before, _, after = page.rpartition("</body>")
    return f"{before}{UNFOLD}</body>{after}"


def with_terms(page: str) -> str:
    "Each term of the glossary can be led to: glossary.html#term-privacy-unit."

    def term(match: re.Match) -> str:
        plain = unicodedata.normalize("NFKD", text_of(match[2]).lower()).encode("ascii", "ignore").decode()
        anchor = re.sub(r"[^a-z0-9]+", "-", plain).strip("-")
        return f'<li id="term-{anchor}">{match[1] or ""}<strong>{match[2]}</strong>'

    return re.sub(r"<li>(<p>)?<strong>(.*?)</strong>", term, page, flags=re.DOTALL)


def spellings(page: str) -> dict[str, str]:
    "Each formula as the search index spells it, glyphs and TeX in one, and its glyphs alone."
    found = {}
    for formula in FORMULA.findall(page):
        both, glyphs = (" ".join(html.unescape(TAG.sub("", text)).split()) for text in (formula, ANNOTATION.sub("", formula)))
        if len(both) > len(glyphs):
            found[both] = glyphs
    return found


def finish_search(folder: Path, pages: dict[str, str]) -> None:
    "The search index without the TeX beside each formula."
    path = folder / "search.json"
    if not path.exists():
        return
    entries, known = json.loads(path.read_text(encoding="utf-8")), {}
    for entry in entries:
        name = entry["href"].split("#")[0]
        if name in pages and name not in known:
            known[name] = sorted(spellings(pages[name]).items(), key=lambda pair: -len(pair[0]))
        for field in ("text", "section", "title"):
            text = html.unescape(entry.get(field) or "")
            for both, glyphs in known.get(name, ()):
                edge = r"\b" if both.isalnum() else ""                             # $f$ is "ff" there, which words hold too
                if both in text:
                    text = re.sub(edge + re.escape(both) + edge, glyphs.replace("\\", r"\\"), text)
            entry[field] = html.escape(text, quote=False)
    path.write_text(json.dumps(entries, ensure_ascii=False, indent=1), encoding="utf-8")


def labels_of_the_book() -> dict[str, str]:
    "Every label with its page as the site names it."
    return {label: str(chapter.path.relative_to(ROOT).with_suffix(".html"))
            for chapter in chapters() if chapter.path.exists() for label in chapter.labels}


def finish(folder: Path = SITE) -> list[str]:
    "Every page of the site, once; nothing to say."
    pages = {str(path.relative_to(folder)): path.read_text(encoding="utf-8") for path in sorted(folder.rglob("*.html"))}
    finish_search(folder, pages)
    labels = labels_of_the_book()
    cited = set(re.findall(r'id="ref-([\w:-]+)"', pages.get("references.html", "")))
    for name, page in pages.items():
        if UNFOLD in page:                                                         # finished before, and not rendered again
            continue
        done = with_links(with_letters(with_stops(with_low_fences(with_alt(without_scripts(page))))), labels, name, cited)
        done = with_whole_numbers(with_marks_for_style(with_reachable_tables(with_named_controls(done))))
        done = with_folds(with_sizes(done, (folder / name).parent))
        (folder / name).write_text(with_terms(done) if Path(name).stem == "glossary" else done, encoding="utf-8")
    return []


# ---- check


class Page(HTMLParser):
    "What the checks ask of a page: its anchors, where it leads, what it loads, its pictures and its text."

    LOADS: ClassVar = dict.fromkeys(("script", "img", "iframe", "source", "audio", "video", "embed"), "src") | {"object": "data"}

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.anchors, self.links, self.loaded, self.nameless, self.words = set(), [], [], [], []
        self.silent = 0  # inside what is no text
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        given = dict(attributes)
        self.anchors |= {given.get("id"), given.get("name")} - {None}
        if tag in ("a", "area") and given.get("href"):
            self.links.append(given["href"])
        if tag == "link" and {"stylesheet", "icon", "preload", "modulepreload", "preconnect"} & set((given.get("rel") or "").split()):
            self.loaded.append(given.get("href") or "")
        if tag in self.LOADS and given.get(self.LOADS[tag]):
            self.loaded.append(given[self.LOADS[tag]])
        if tag == "img" and not given.get("alt") and "sidebar-logo" not in (given.get("class") or ""):
            self.nameless.append((given.get("src") or "")[:60])
        self.silent += tag in ("script", "style", "pre", "code", "annotation")

    def handle_endtag(self, tag: str) -> None:
        self.silent -= tag in ("script", "style", "pre", "code", "annotation")

    def handle_data(self, data: str) -> None:
        if not self.silent:
            self.words.append(data)


def elsewhere(address: str) -> bool:
    return bool(urlsplit(address).netloc)


def requests_in_css(folder: Path) -> Iterator[str]:
    "What a style sheet would fetch from others."
    asked = re.compile(r"""(?:@import\s+(?:url\()?|url\()\s*["']?((?:https?:)?//[^"')\s;]+)""")
    for path in sorted(folder.rglob("*.css")):
        for address in asked.findall(path.read_text(encoding="utf-8")):
            yield f"{path.relative_to(folder)} asks {urlsplit(address).netloc} for something"


def page_problems(name: str, page: Page, pages: dict[str, Page], folder: Path) -> Iterator[str]:
    "What is wrong with one page, as far as its text tells."
    for address in page.loaded:
        if elsewhere(address):
            yield f"{name} asks {urlsplit(address).netloc} for something"
    for address in {*page.links, *(there for there in page.loaded if not there.startswith("data:"))}:
        parts = urlsplit(address)
        if parts.scheme or parts.netloc:
            continue
        target = os.path.normpath(Path(name).parent / unquote(parts.path)) if parts.path else name
        if not (folder / target).exists():
            yield f"{name} leads to {address}, which does not exist"
        elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
            yield f"{name} leads to {address}, where there is no such place"
    yield from (f"{name}: a picture without alternative text, {source}" for source in page.nameless)
    text = " ".join(page.words)
    unresolved = set(re.findall(r"\?@[\w-]+|(?<![\w@./])@(?:\w{2,3}-[\w-]+)", text))
    yield from (f"{name}: {found} did not resolve" for found in sorted(unresolved))


DRIVER = """<!DOCTYPE html><meta charset="utf-8"><pre id="found"></pre>AXE<script>
const pages = PAGES, width = WIDTH, found = [];
const frame = document.createElement("iframe");
frame.style = `width:${width}px;height:1200px;border:0;position:absolute;left:0;top:0`;
document.body.append(frame);
const pause = (time) => new Promise((done) => setTimeout(done, time));
LOOK
(async () => {
  for (const name of pages) {
    await new Promise((done) => { frame.onload = done; frame.src = name; });
    await look(name, frame.contentDocument);
  }
  document.getElementById("found").textContent = "done" + JSON.stringify(found);
})();
</script>"""

MEASURE = """
const short = (block) => block.textContent.split("\\n").every((line) => line.length <= 88);
const cut = (page) => [...page.querySelectorAll("main pre")].filter((block) => block.getClientRects().length && short(block) &&
  [block, block.querySelector("code")].some((one) => one && one.scrollWidth > block.clientWidth + 1));
const look = async (name, page) => {
  await pause(60);
  if (width > 600) for (const block of cut(page)) found.push([name, "code", block.textContent.trim().slice(0, 50)]);
  const across = page.documentElement.scrollWidth;
  if (across > width + 1) {
    const all = [...page.querySelectorAll("main *, .page-navigation *, .quarto-secondary-nav *")];
    const wide = all.filter((one) => one.getBoundingClientRect().right > width + 1).at(-1);
    found.push([name, "across", `${across} px: ${wide ? wide.tagName.toLowerCase() + " " + wide.textContent.trim().slice(0, 40) : ""}`]);
  }
};"""

ASK_AXE = """
const look = async (name, page) => {
  const script = page.createElement("script");
  script.textContent = document.getElementById("axe").textContent;
  const still = page.createElement("style");
  still.textContent = "* { transition: none !important }"; // a colour on its way is no colour of the page
  page.head.append(script, still);
  for (const theme of ["light", "dark"]) {
    if (theme === "dark") {
      if (!frame.contentWindow.quartoToggleColorScheme) break;
      frame.contentWindow.quartoToggleColorScheme();
    }
    await pause(700);
    for (const fault of (await frame.contentWindow.axe.run(page, {resultTypes: ["violations"]})).violations)
      found.push([name, fault.impact,
        `${theme}, ${fault.help} (${fault.id}, ${fault.nodes.length} times), first at ${fault.nodes[0].target}`]);
  }
};"""


def measured(folder: Path, names: list[str], width: int, chromium: str, look: str = MEASURE, axe: str = "") -> list[list[str]]:
    "What Chromium sees at one width: page, kind, words. All pages load, one after the other, in a frame of that width."
    with tempfile.TemporaryDirectory() as aside:
        driver, addresses = Path(aside, "measure.html"), [(folder / name).resolve().as_uri() for name in names]
        held = f'<script id="axe" type="text/plain">{axe}</script>' if axe else ""
        page = DRIVER.replace("PAGES", json.dumps(addresses)).replace("WIDTH", str(width)).replace("LOOK", look).replace("AXE", held, 1)
        driver.write_text(page, encoding="utf-8")
        command = [chromium, "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-extensions",
                   "--disable-background-networking", "--disable-component-update", "--disable-sync", f"--user-data-dir={aside}/profile",
                   "--host-resolver-rules=MAP * ~NOTFOUND", "--allow-file-access-from-files", f"--window-size={width + 20},1200",
                   "--virtual-time-budget=3600000", "--dump-dom", driver.as_uri()]
        seen = subprocess.run(command, capture_output=True, text=True, timeout=300).stdout
    told = re.search(r'<pre id="found">done(.*?)</pre>', seen, re.DOTALL)
    if not told:
        raise RuntimeError(f"{chromium} did not come to the end of {len(names)} pages at {width} px")
    named = dict(zip(addresses, names, strict=True))
    return [[named[address], kind, words] for address, kind, words in json.loads(html.unescape(told[1]))]


def browser() -> str | None:
    return next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


def axe(script: str, *names: str, folder: Path = SITE) -> list[str]:
    "What axe-core finds on some pages, one sentence each: the critical and the serious are problems, the others are only printed."
    chromium = browser()
    if not chromium:
        return ["axe needs a Chromium to look with"]
    pages = [name for name in names or LOOKED_AT if names or (folder / name).exists()]
    found = measured(folder, pages, WIDE, chromium, ASK_AXE, Path(script).read_text(encoding="utf-8"))
    grave = [f"{name}: {impact}: {words}" for name, impact, words in found if impact in ("critical", "serious")]
    for name, impact, words in found:
        if impact not in ("critical", "serious"):
            print(f"{name}: {impact}: {words}")
    print(f"axe looked at {len(pages)} pages: {len(grave)} critical or serious, {len(found) - len(grave)} lesser")
    return grave


def browser_problems(folder: Path, names: list[str]) -> Iterator[str]:
    "What only shows when it is drawn; it is said when there is nothing to draw with."
    chromium = browser()
    if not chromium:
        print("skipped, for want of Chromium: code that is cut off, pages that scroll sideways")
        return
    told = {"code": f"at {WIDE} px: code of at most 88 characters a line must be scrolled:", "across": f"scrolls sideways at {WIDE} px,"}
    for name, kind, words in measured(folder, names, WIDE, chromium):
        yield f"{name} {told[kind]} {words}"
    yield from (f"{name} scrolls sideways at {NARROW} px, {words}" for name, _, words in measured(folder, names, NARROW, chromium))


def check(folder: Path = SITE) -> list[str]:
    "What is wrong with the site, one sentence each."
    pages = {str(path.relative_to(folder)): Page(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.html"))
             if "site_libs" not in path.parts}
    if not pages:
        return [f"{folder} holds no pages"]
    found = [sentence for name, page in pages.items() for sentence in page_problems(name, page, pages, folder)]
    found += [*requests_in_css(folder), *browser_problems(folder, list(pages))]
    links = sum(len(page.links) for page in pages.values())
    print(f"{len(pages)} pages with {links:,} links: {len(found)} problems")
    return found


if __name__ == "__main__":
    told = axe(*sys.argv[2:]) if sys.argv[1] == "axe" else {"finish": finish, "check": check}[sys.argv[1]](*map(Path, sys.argv[2:]))
    print(*told, sep="\n", file=sys.stderr)
    sys.exit(1 if told else 0)
