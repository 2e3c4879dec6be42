"""The site's tools: how a page is finished, what the checker finds, what `make test` reports, and that the first page tells the truth."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
from test_book import tool

from dpft.book import experiments

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def site():
    tool("_book")
    return tool("_site")


# ---- finishing a page


def test_what_others_would_be_asked_for_is_taken_out(site):
    page = ('<head><script src="https://cdnjs.cloudflare.com/require.min.js" crossorigin="anonymous"></script>\n'
            '<script src="//unpkg.com/a.js" data-relocate-top="true"></script>\n'
            "<script type=\"application/javascript\">define('jquery', [],function() {return window.jQuery;})</script>\n"
            '<script src="site_libs/quarto.js"></script><script>let kept = 1</script></head>')
    assert site.without_scripts(page) == '<head><script src="site_libs/quarto.js"></script><script>let kept = 1</script></head>'


def test_a_caption_stands_for_missing_words(site):
    formula = '<math display="inline"><mi>ε</mi><annotation encoding="application/x-tex">\\varepsilon</annotation></math>'
    page = f'<figure><img src="a.png"><figcaption id="c">Figure&nbsp;3.1: Loss &lt; "1" at {formula}, <b>bold</b></figcaption></figure>'
    assert '<img alt="Loss &lt; &quot;1&quot; at ε, bold" src="a.png">' in site.with_alt(page)
    for kept in ('<figure><img alt="own" src="a.png"><figcaption>Other</figcaption></figure>', '<figure><img src="a.png"></figure>',
                 '<img src="a.png">'):
        assert site.with_alt(kept) == kept
    empty = '<figure><img src="a.png" alt=""><figcaption>B</figcaption></figure>'
    assert site.with_alt(empty).startswith('<figure><img alt="B" src="a.png">')


def test_a_narrow_figure_is_not_blown_up(site, tmp_path):
    head = b"\x89PNG\r\n\x1a\n" + (13).to_bytes(4, "big") + b"IHDR" + (800).to_bytes(4, "big") + (600).to_bytes(4, "big") + bytes(9)
    density = (9).to_bytes(4, "big") + b"pHYs" + 2 * (7874).to_bytes(4, "big")     # 200 pixels an inch
    (tmp_path / "four.png").write_bytes(head + density + b"\x01")
    (tmp_path / "ratio.png").write_bytes(head + density + b"\x00")                 # an aspect ratio, and no length
    (tmp_path / "plain.png").write_bytes(head)
    image = '<img src="{}" class="figure-img">'
    assert site.with_sizes(image.format("four.png"), tmp_path) == '<img style="width:448px" src="four.png" class="figure-img">'
    others = ("ratio.png", "plain.png", "none.png", "https://a.example/four.png", "drawn.svg")
    for kept in (*map(image.format, others), '<img src="four.png">'):
        assert site.with_sizes(kept, tmp_path) == kept


def test_the_controls_of_the_frame_have_names_and_roles(site):
    page = ('<nav class="quarto-secondary-nav"><a class="flex-grow-1" role="navigation" aria-label="Toggle sidebar navigation"></a></nav>'
            '<nav id="quarto-sidebar" class="sidebar"><a href="i.html" class="sidebar-logo-link"><img alt=""></a>'
            '<a class="sidebar-item-toggle" role="navigation" aria-label="Toggle section"></a></nav>'
            '<nav class="page-navigation"><a href="b.html" class="pagination-link" aria-label="B">2 B</a></nav>')
    done = site.with_named_controls(page)
    assert 'role="navigation"' not in done and done.count('role="button"') == 2
    assert '<a href="b.html" class="pagination-link">2 B</a>' in done and 'class="sidebar-logo-link" aria-label="First page">' in done
    folded = '<div class="callout-header" data-bs-toggle="collapse" aria-expanded="false" aria-label="Toggle callout">'
    assert site.with_named_controls(folded) == ('<div class="callout-header" role="button" tabindex="0" data-bs-toggle="collapse" '
                                                'aria-expanded="false">')
    landmarks = re.findall(r"<nav [^>]*>", done)
    assert len({re.search('aria-label="([^"]*)"', tag)[1] for tag in landmarks}) == len(landmarks) == 3


def test_a_wide_table_is_reached_by_keys_and_its_rows_can_be_lists(site):
    def table(columns):
        heads, cells = ("".join(f"<{tag}>{text} {k}</{tag}>" for k in range(columns))
                        for tag, text in (("th", "a &lt;"), ("td", "b")))
        return f'<table class="t"><thead><tr>{heads}</tr></thead><tr>{cells}</tr></table>'
    done = site.with_reachable_tables(f"<p>{table(3)}</p>{table(4)}{table(8)}")
    reached = table(3).replace("<table", '<table tabindex="0"')
    assert done.startswith(f'<p>{reached}</p><div class="stacks"><table tabindex="0" class="t">') and done.count('tabindex="0"') == 3
    assert '<td data-name="a &lt; 0">b 0</td><td data-name="a &lt; 1">b 1</td>' in done
    assert done.endswith("b 7</td></tr></table></div>")


def test_a_number_stays_on_one_line_with_its_interval(site):
    done = site.with_whole_numbers('<td style="a">−2.6 ± 6.4 (3)</td><td>1.02 (0.98–1.10)</td><td>of 3 seeds</td><p>by 2.4 ± 1 points</p>')
    assert done == ('<td class="number" style="a">−2.6\u00a0±\u00a06.4 (3)</td><td class="number">1.02 (0.98–1.10)</td><td>of 3 seeds</td>'
                    '<p>by 2.4\u00a0±\u00a01 points</p>')


def test_the_output_of_an_answer_is_marked_and_no_other(site):
    def cell(of, marked=""):
        return (f'<div id="a" class="cell{marked}">\n<details class="code-fold">\n<summary>{of}</summary>c</details>'
                '<div class="cell-output">o</div></div>')
    assert site.with_marks_for_style(cell("Answer") + cell("Code: rate")) == cell("Answer", " answer") + cell("Code: rate")
    assert site.with_marks_for_style("<p><em>Runs in about 5 s</em></p>") == '<p class="takes"><em>Runs in about 5 s</em></p>'


def test_a_stop_stays_beside_its_formula(site):
    math = '<math display="inline"><mi>x</mi></math>'
    assert site.with_stops(f"<p>{math}, and {math} so {math}).</p>") == (
        f'<p><span class="with-stop">{math},</span> and {math} so <span class="with-stop">{math}).</span></p>')
    assert site.with_stops('<math display="block"><mi>x</mi></math>.') == '<math display="block"><mi>x</mi></math>.'


def test_letters_and_accents_stand_where_they_belong(site):
    assert site.with_letters('<mo>ℓ</mo><mover><mi>s</mi><mo accent="true">\u0303</mo></mover>') == (
        '<mi>ℓ</mi><mover><mi>s</mi><mo accent="true">\u02dc</mo></mover>')


def fence(inside, sign="‖", stretchy="true"):
    return (f'<mrow><mo stretchy="{stretchy}" form="prefix">{sign}</mo>{inside}<mo stretchy="{stretchy}" form="postfix">'
            f'{sign.translate({40: 41, 91: 93})}</mo></mrow>')


def test_fences_are_as_high_as_what_they_hold(site):
    line, fraction = "<mi>g</mi>", "<mfrac><mi>a</mi><mi>b</mi></mfrac>"
    assert site.with_low_fences(fence(line)) == fence(line, stretchy="false")
    assert site.with_low_fences(fence(fence(line, "("))) == fence(fence(line, "(", "false"), stretchy="false")
    accented = '<mover><mi>g</mi><mo accent="true">‾</mo></mover>'
    assert site.with_low_fences(fence(accented)) == fence(accented, stretchy="false")
    assert site.with_low_fences(fence(fraction)) == fence(fraction)
    assert site.with_low_fences(fence(line + fence(fraction, "("))) == fence(line + fence(fraction, "("))


def test_references_in_code_lead_to_what_they_name(site):
    labels = {"lem-a": "nbs/1_start/01_a.html"}
    page = '<pre class="sourceCode python"><span class="co">By @lem-a and @paper, not @lem-b or me@paper.</span></pre> @lem-a'
    assert site.with_links(page, labels, "nbs/2_methods/02_b.html", {"paper"}) == (
        '<pre class="sourceCode python"><span class="co">By <a href="../1_start/01_a.html#lem-a" title="where it stands">@lem-a</a> and '
        '<a href="../../references.html#ref-paper" title="in the references">@paper</a>, not @lem-b or me@paper.</span></pre> @lem-a')


def test_a_term_of_the_glossary_can_be_led_to(site):
    page = "<ul><li><p><strong>Rényi DP</strong>, one.</p></li>\n<li><strong>privacy unit</strong> two <strong>no term</strong></li></ul>"
    assert site.with_terms(page) == page.replace("<li><p>", '<li id="term-renyi-dp"><p>').replace(
        "<li><strong>", '<li id="term-privacy-unit"><strong>')


PROOF = '<div class="proof">\n<p><span class="proof-title"><em>Proof</em>. </span>{}</p>\n<div>And a list.</div>\n</div>'
HEADED = ('<section id="sec-a" class="level2">\n<h2 class="anchored"><span class="number">1.1</span> {}</h2>\n<p>First.</p>\n'
          '<section id="sec-b" class="level3"><h3>Deep</h3><p id="deep">Second.</p></section>\n</section>')


FOLDED = '<section id="sec-c" class="level2 folded"><h2>Errata</h2><p>Last.</p></section>'


def test_a_long_proof_and_an_optional_section_fold_and_nothing_is_lost(site):
    short, long = PROOF.format("Clear."), PROOF.format("Long. " * 60)
    page = f"<body>{short}{long}{HEADED.format('Needed')}{HEADED.format('Optional: more')}{FOLDED}</body>"
    done = site.with_folds(page)
    assert done.count("<details") == done.count("</details>") == 3 and done.startswith(f"<body>{short}")
    assert '<div class="proof">\n<details class="folded"><summary>Proof</summary>\n<p>Long. ' in done
    assert HEADED.format("Needed") in done and re.search(r"more</h2>\n<p>First\.</p><details[^>]*><summary>Show", done)
    assert re.search(r"Second\.</p></section>\n</details>\n</section>", done) and done.endswith(f"{site.UNFOLD}</body>")
    plain = re.sub(r"<details[^>]*><summary>.*?</summary>|</details>|<span class=\"proof-title\">.*?</span>|\n", "", done)
    assert plain.replace(site.UNFOLD.replace("\n", ""), "") == re.sub(r"<span class=\"proof-title\">.*?</span>|\n", "", page)


def test_a_page_is_finished_once(site, tmp_path):
    (tmp_path / "a.html").write_text(f"<html><body><main>{PROOF.format('Long. ' * 60)}</main></body></html>")
    site.finish(tmp_path)
    once = (tmp_path / "a.html").read_text()
    site.finish(tmp_path)
    assert (tmp_path / "a.html").read_text() == once and once.count("<details") == 1


@pytest.mark.skipif(not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), reason="needs a Chromium")
def test_what_is_folded_opens_for_an_address_a_search_and_paper(site, tmp_path):
    callout = ('<div aria-controls="c" aria-expanded="false"></div><div id="c" class="callout-collapse collapse"><p id="in">x</p></div>')
    pages = {"a.html": f"{HEADED.format('Optional: more')}{PROOF.format('Long. ' * 60)}{callout}",
             "b.html": PROOF.format("<mark>Long.</mark> " * 60)}
    for name, folds in pages.items():
        (tmp_path / name).write_text(site.with_folds(f"<!DOCTYPE html><html><body><main>{folds}</main></body></html>"))
    look = """const look = async (name, page) => {
      await pause(60);
      const its = frame.contentWindow, folds = [...page.querySelectorAll("details")];
      const open = () => found.push([name, "open", folds.map((one) => one.open).join()]);
      const lead = (hash) => { its.history.replaceState(null, "", hash); its.dispatchEvent(new its.Event("hashchange")); open(); };
      open();
      for (const event of ["beforeprint", "afterprint"]) { its.dispatchEvent(new its.Event(event)); open(); }
      lead("#deep");
      lead("#in");
      found.push([name, "callout", page.querySelector(".callout-collapse.show") ? page.querySelector("[aria-controls]").ariaExpanded : ""]);
    };"""
    seen = site.measured(tmp_path, [*pages], 1280, site.browser(), look)
    assert [words for name, _, words in seen if name == "a.html"] == [
        "false,false", "true,true", "false,false", "true,false", "true,false", "true"]
    assert next(words for name, _, words in seen if name == "b.html") == "true"


def section(number, *links, show=" show"):
    items = "".join(f'<li class="sidebar-item"><a href="{link}" class="sidebar-item-text sidebar-link">x</a></li>' for link in links)
    return (f'<li class="sidebar-item sidebar-item-section"><a aria-expanded="true">Part</a>'
            f'<ul id="quarto-sidebar-section-{number}" class="collapse list-unstyled sidebar-section depth1{show}">{items}</ul></li>')


def test_the_search_index_spells_a_formula_once(site, tmp_path):
    letter = '<math display="inline"><mi>f</mi><annotation encoding="application/x-tex">f</annotation></math>'
    math = '<math display="inline"><mi>C</mi><mo>&gt;</mo><mn>0</mn><annotation encoding="application/x-tex">C &gt; 0</annotation></math>'
    entry = {"href": "a.html#one", "title": "A", "section": "One", "text": "For C&gt;0C &gt; 0, R&amp;D holds; ff differs"}
    (tmp_path / "search.json").write_text(json.dumps([entry]))
    site.finish_search(tmp_path, {"a.html": f"<p>For {math}, R&amp;D holds; {letter} differs</p>"})
    assert json.loads((tmp_path / "search.json").read_text())[0]["text"] == "For C&gt;0, R&amp;D holds; f differs"


# ---- the checker, each check tried on a small site with one fault


GOOD = ('<html><body><main><h1 id="a">A</h1><a href="b.html#b">B</a> <a href="https://example.org">out</a> <img src="p.png" alt="p">'
        "</main></body></html>")


@pytest.fixture
def small(tmp_path, site, monkeypatch):
    "A site of two pages that is right."
    (tmp_path / "a.html").write_text(GOOD)
    (tmp_path / "b.html").write_text('<html><body><main><h1 id="b">B</h1><a href="#b">up</a><a href="a.html">A</a></main></body></html>')
    (tmp_path / "p.png").write_bytes(b"")
    (tmp_path / "style.css").write_text("p { color: red } @font-face { src: url(p.png) }")
    monkeypatch.setattr(site, "browser_problems", lambda folder, names: [])
    return tmp_path


def test_a_right_site_has_no_problem(site, small):
    assert site.check(small) == []


@pytest.mark.parametrize(("old", "new", "told"), [
    ("b.html#b", "b.html#c", "no such place"), ("b.html#b", "c.html", "does not exist"), ('src="p.png"', 'src="q.png"', "does not exist"),
    (' alt="p"', "", "alternative text"), (' alt="p"', ' alt=""', "alternative text"), ("<main>", "<main>?@lem-none ", "did not resolve"),
    ("<main>", "<main>as @fig-none shows ", "did not resolve"),
    ("<main>", '<script src="https://cdn.example/x.js"></script><main>', "asks cdn.example"),
    ("<main>", '<link rel="stylesheet" href="//fonts.example/css"><main>', "asks fonts.example"),
    ("<main>", '<main><iframe src="https://frame.example"></iframe>', "asks frame.example")])
def test_a_fault_of_a_page_is_found(site, small, old, new, told):
    (small / "a.html").write_text(GOOD.replace(old, new))
    found = site.check(small)
    assert len(found) == 1 and told in found[0], found


@pytest.mark.parametrize("style", ['@import url("https://fonts.example/css2?family=A");', '@import "//fonts.example/a.css";',
                                   "@font-face { src: url(https://fonts.example/a.woff2) }"])
def test_a_style_sheet_that_asks_others_is_found(site, small, style):
    (small / "style.css").write_text(style)
    assert site.check(small) == ["style.css asks fonts.example for something"]


def test_code_and_addresses_may_hold_what_looks_like_a_reference(site, small):
    (small / "a.html").write_text(GOOD.replace("<main>", "<main><code>@lem-none</code><pre>?@fig-b</pre> me@lem-mail.org "))
    assert site.check(small) == []


@pytest.mark.skipif(not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), reason="needs a Chromium")
def test_what_is_cut_or_too_wide_is_seen(site, tmp_path):
    head = '<!DOCTYPE html><html><head><style>main { max-width: 800px }</style></head><body><main>'
    (tmp_path / "right.html").write_text(f'{head}<pre style="overflow:auto"><code>{"x" * 400}</code></pre>')   # long code scrolls
    (tmp_path / "cut.html").write_text(f'{head}<pre style="overflow:auto;font-size:20px"><code>{"x" * 80}</code></pre>')
    (tmp_path / "wide.html").write_text(f'{head}<table style="width:600px"><tr><td>wide</td></tr></table>')
    found = list(site.browser_problems(tmp_path, ["right.html", "cut.html", "wide.html"]))
    assert [sentence.split(":")[0] for sentence in found] == ["cut.html at 1280 px", "wide.html scrolls sideways at 390 px, 608 px"]


@pytest.mark.skipif(not any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), reason="needs a Chromium")
def test_what_axe_says_is_told_by_gravity(site, tmp_path, capsys):
    stub = """window.axe = {run: async (page) => ({violations: [...page.querySelectorAll("main i")].map((one) => (
        {impact: one.className, help: one.textContent, id: "rule", nodes: [{target: ["main i"]}]}))})};"""
    (tmp_path / "axe.js").write_text(stub)
    (tmp_path / "a.html").write_text('<body><main><i class="serious">No name</i><i class="minor">Small</i></main></body>')
    found = site.axe(str(tmp_path / "axe.js"), "a.html", folder=tmp_path)
    assert found == ["a.html: serious: light, No name (rule, 1 times), first at main i"]
    assert "a.html: minor: light, Small" in capsys.readouterr().out


# ---- the stages of make test


@pytest.fixture
def staged(tmp_path):
    "The script that runs stages, in a folder of its own, with a make that does as it is told."
    (tmp_path / ".ci").mkdir()
    shutil.copy(ROOT / ".ci/stages", tmp_path / ".ci/stages")
    fake = tmp_path / "make"
    fake.write_text('#!/usr/bin/env bash\ncat "$2.txt"; exit $(cat "$2.rc" 2>/dev/null || echo 0)\n')
    fake.chmod(0o755)

    def run(**stages):
        for name, (text, status) in stages.items():
            (tmp_path / f"{name}.txt").write_text(text)
            (tmp_path / f"{name}.rc").write_text(str(status))
        done = subprocess.run([tmp_path / ".ci/stages", *stages], capture_output=True, text=True, env=os.environ | {"MAKE": str(fake)})
        return done.returncode, done.stdout.splitlines()

    return run


def test_a_failing_stage_hides_no_other_and_all_failures_are_named_last(staged):
    status, lines = staged(lint=("E501\n", 2), executed=("nbs/a.ipynb 3 s\nTraceback\nFAILED nbs/b.ipynb\n", 123),
                           tested=("..F\nFAILED tests/test_a.py::test_b - assert 1\n1 failed, 9 passed in 3.00s\n", 1), exported=("", 0))
    assert status == 1
    assert [line for line in lines if line.startswith("-- ")][:4] == ["-- lint", "-- executed", "-- tested", "-- exported"]
    assert lines[-4:] == ["FAILED nbs/b.ipynb", "FAILED tests/test_a.py::test_b - assert 1", "1 failed, 9 passed in 3.00s",
                          "failed: lint executed tested"]


def test_the_site_is_made_beside_the_others_and_what_it_says_comes_after_theirs(staged):
    status, lines = staged(rendered=("183 pages: 1 problem\n", 1), tested=("9 passed in 3.00s\n", 0))
    assert status == 1 and lines[-1] == "failed: rendered"
    assert lines.index("183 pages: 1 problem") > lines.index("9 passed in 3.00s")
    status, lines = staged(rendered=("183 pages: 0 problems\n", 0), tested=("9 passed in 3.00s\n", 0))
    assert status == 0 and lines[-1] == "all of it holds: rendered tested"


def test_when_all_holds_the_counts_stand_at_the_end(staged):
    status, lines = staged(lint=("", 0), tested=("...\n9 passed, 1 skipped in 3.00s\n", 0))
    assert status == 0 and lines[-2:] == ["9 passed, 1 skipped in 3.00s", "all of it holds: lint tested"]


# ---- salt


DRAWS = """import random, numpy, torch
from numpy.random import RandomState
torch.manual_seed(0)
random.seed(0)
numpy.random.seed(0)
print([random.random(), random.Random(0).random(), numpy.random.rand(), numpy.random.default_rng(0).random(), RandomState(0).rand(),
       torch.rand(1).item(), torch.rand(1, generator=torch.Generator().manual_seed(0)).item()])"""


def drawn(salt, testing="1"):
    plain = {name: value for name, value in os.environ.items() if name not in ("DPFT_SALT", "DPFT_TESTING")}
    own = {"DPFT_SALT": salt, "DPFT_TESTING": testing, "PYTHONPATH": str(ROOT / "tests/salted")}
    environment = plain | {name: value for name, value in own.items() if value}
    return subprocess.run([sys.executable, "-c", DRAWS], capture_output=True, text=True, env=environment)


def test_every_seed_draws_something_else_under_each_salt_and_the_same_twice():
    plain, first, again, second = (json.loads(drawn(salt).stdout) for salt in ("", "1", "1", "2"))
    assert first == again
    assert all(len(set(numbers)) == 3 for numbers in zip(plain, first, second, strict=True))
    assert plain == [0.8444218515250481, 0.8444218515250481, 0.5488135039273248, 0.6369616873214543, 0.5488135039273248, *plain[5:]]


def test_salt_is_refused_outside_tests_and_must_be_a_number():
    outside, word = drawn("1", testing=""), drawn("salt")
    assert outside.returncode == 2 and outside.stderr.startswith("DPFT_SALT is for tests") and not outside.stdout
    assert word.returncode == 2 and "whole number" in word.stderr


def test_a_pinned_test_is_left_out_under_a_salt(tmp_path):
    (tmp_path / "conftest.py").write_text((ROOT / "tests/conftest.py").read_text())
    shutil.copytree(ROOT / "tests/salted", tmp_path / "salted", ignore=shutil.ignore_patterns("__pycache__"))
    (tmp_path / "test_it.py").write_text("import pytest, random\n@pytest.mark.pinned\ndef test_by_value():\n"
                                         "    assert random.Random(0).random() == 0.8444218515250481\ndef test_any(): pass\n")
    plain = {name: value for name, value in os.environ.items()
             if name not in ("DPFT_SALT", "DPFT_TESTING", "DPFT_INSTALLED", "PYTHONPATH")}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_it.py"]

    def told(**extra):
        return subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=plain | extra).stdout

    assert "2 passed" in told() and "1 passed, 1 deselected" in told(DPFT_SALT="3")


# ---- the first page


def test_the_first_page_says_what_the_records_say():
    text = (ROOT / "index.qmd").read_text(encoding="utf-8")
    records = [json.loads(line) for line in (ROOT / "nbs/results/quickstart.jsonl").read_text(encoding="utf-8").splitlines()]

    def accuracy(method, epsilon):
        return 100 * np.mean([r["metrics"]["accuracy"] for r in records if r["method"] == method and float(r["target_epsilon"]) == epsilon])

    told = re.search(r"classifies ([\d.]+) % .*? its last layer .*? at ε = 2; without privacy it reaches ([\d.]+) %\.\n"
                     r"Trained as a whole at ε = 2 it reaches ([\d.]+) %", text)
    wanted = [accuracy("LastLayer", 2.0), accuracy("LastLayer", np.inf), accuracy("Full", 2.0)]
    assert [float(number) for number in told.groups()] == [round(number, 1) for number in wanted]


def test_the_front_page_has_each_method_at_the_best_of_five_rates_of_which_none_lies_at_an_edge(monkeypatch):
    monkeypatch.setenv("DPFT_RESULTS", str(ROOT / "nbs/results"))
    best = experiments.best_rates("quickstart-tuning", lambda run: (run["method"], float(run["target_epsilon"])))
    assert {(method, epsilon): rate for method, rates in experiments.QUICKSTART_RATES.items() for epsilon, rate in rates.items()} == best
    assert all(rate not in (experiments.TRIED[method][0], experiments.TRIED[method][-1]) for (method, _), rate in best.items())
    counts = Counter((run["method"], run["target_epsilon"]) for run in experiments.recorded(experiments.results_file("quickstart")))
    assert len(counts) == 12 and set(counts.values()) == {10}


def test_the_first_page_names_the_four_papers_with_a_link_each():
    text = (ROOT / "index.qmd").read_text(encoding="utf-8")
    for paper in ("DP-BiTFiT", "DP-FROST", "DP-SGD-LF", "Rap-FT"):
        assert re.search(rf"\| {paper}: \[[^\]]+\]\(https://", text), paper
