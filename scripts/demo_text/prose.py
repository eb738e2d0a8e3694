"""Documentation files (HTML, POD, plain text) to readable prose: paragraphs, headings and list items, nothing else."""

import html.parser
import re
import textwrap
from typing import Literal, NamedTuple

Kind = Literal["heading", "term", "text", "item", "gap"]


class Block(NamedTuple):
    """One paragraph of a document; a gap stands where a listing or a table was left out, and has no text."""

    kind: Kind
    text: str


_SKIPPED_TAGS = frozenset(
    "script style head nav table pre form button svg footer select textarea noscript math object iframe".split()
)
_SKIPPED_CLASSES = frozenset(
    """sphinxsidebar related footer navheader navfooter toc toctree-wrapper contents headerlink sidebar breadcrumb
    breadcrumbs rst-versions highlight literal-block code-header indextable genindextable admonition-todo navigation
    qindex nosearch nav-wrapper sphinxsidebarwrapper fancy_title fancy_toc menubar sphx-glr-timing anchor permalink
    version-list apidoc-header programlisting synopsis simple-toc local topic up path preamble top-link spirit-nav
    copyright-footer legalnotice page-header sphx-glr-footer citation math apinav docs-actions src viewcode-link
    deprecated-table out-of-band-hidden rustdoc-toggle-hidden srclink""".split()
)
_LISTING_CLASSES = frozenset("highlight literal-block programlisting synopsis".split())
_HEADINGS = frozenset(f"h{level}" for level in range(1, 7))
_BLOCKS = _HEADINGS | frozenset(
    "p div li dd dt blockquote ul ol dl section article main body tr td th caption hr details summary center".split()
)
_VOID = frozenset("area base br col embed hr img input link meta param source track wbr".split())


class _Extractor(html.parser.HTMLParser):
    """Collects blocks; tags of one name are counted while inside a skipped element, so unclosed others don't matter."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.blocks: list[Block] = []
        self._parts: list[str] = []
        self._kind: Kind = "text"
        self._skipping: str | None = None
        self._depth = 0

    def handle_starttag(self, tag, attrs):
        if self._skipping:
            self._depth += tag == self._skipping and tag not in _VOID
            return
        values = dict(attrs)
        classes = f"{values.get('class') or ''} {values.get('id') or ''} {values.get('role') or ''}".lower().split()
        skipped = tag in _SKIPPED_TAGS or not _SKIPPED_CLASSES.isdisjoint(classes)
        if skipped and tag not in _VOID and tag not in ("html", "body"):
            if tag in ("pre", "table") or not _LISTING_CLASSES.isdisjoint(classes):
                self.flush("text")
                self.blocks.append(Block("gap", ""))
            elif tag in _BLOCKS:
                self.flush("text")
            self._skipping, self._depth = tag, 1
            return
        if tag == "br":
            self._parts.append(" ")
        elif tag in _HEADINGS:
            self.flush("heading")
        elif tag == "dt":
            self.flush("term")
        elif tag == "li":
            self.flush("item")
        elif tag == "p" and self._kind == "item" and not "".join(self._parts).strip():
            return
        elif tag in _BLOCKS:
            self.flush("text")

    def handle_startendtag(self, tag, attrs):
        if tag == "br" and not self._skipping:
            self._parts.append(" ")

    def handle_endtag(self, tag):
        if self._skipping:
            self._depth -= tag == self._skipping
            if not self._depth:
                self._skipping = None
            return
        if tag in _BLOCKS:
            self.flush("text")

    def handle_data(self, data):
        if not self._skipping:
            self._parts.append(data)

    def flush(self, kind: Kind) -> None:
        text = tidy("".join(self._parts))
        if text:
            self.blocks.append(Block(self._kind, text))
        self._parts, self._kind = [], kind


_REPLACED = str.maketrans(
    dict.fromkeys("\u2018\u2019", "'")
    | dict.fromkeys("\u201c\u201d", '"')
    | dict.fromkeys("\u2010\u2011\u2013\u2212", "-")
    | dict.fromkeys("\u00b6\u200b\ufeff\u00ad", "")
    | {"\u00a0": " ", "\u2026": "...", "\ufb01": "fi", "\ufb02": "fl"}
)


def tidy(text: str) -> str:
    """One line, single spaces, plain quotes and hyphens, no control characters."""
    text = re.sub(r"[\x00-\x1f\x7f]", " ", text.translate(_REPLACED))
    text = re.sub(r" +", " ", text).strip()
    return re.sub(r" ([,.;:!?)])(?= |$)", r"\1", text)


def html_blocks(source: str) -> list[Block]:
    """The text blocks of an HTML page, without navigation, tables, code listings and signatures' links."""
    parser = _Extractor()
    parser.feed(source)
    parser.close()
    parser.flush("text")
    return parser.blocks


_POD_CODE = re.compile(r"([A-Z])(?:<<+ (.*?) >>+|<([^<>]*)>)", re.DOTALL)


def _pod_inline(text: str) -> str:
    def plain(match: re.Match[str]) -> str:
        code, content = match.group(1), match.group(2) if match.group(2) is not None else match.group(3)
        if code in "XZ":
            return ""
        if code == "E":
            return {"lt": "\x01", "gt": "\x02", "sol": "/", "verbar": "|"}.get(content, "")
        if code == "L":
            label = content.split("|")[0] if "|" in content else content.replace("/", " ").replace('"', "")
            return label.strip()
        return content.replace("<", "\x01").replace(">", "\x02")

    for _ in range(4):
        replaced = _POD_CODE.sub(plain, text)
        if replaced == text:
            break
        text = replaced
    return text.replace("\x01", "<").replace("\x02", ">")


def pod_blocks(source: str) -> list[Block]:
    """The text blocks of a POD file: verbatim paragraphs and =for/=begin sections are dropped."""
    blocks: list[Block] = []
    inside_begin = False
    for paragraph in re.split(r"\n\s*\n", source):
        if paragraph.startswith("=begin"):
            inside_begin = True
        elif paragraph.startswith("=end"):
            inside_begin = False
        elif not inside_begin and paragraph.strip() and paragraph[0] in " \t":
            blocks.append(Block("gap", ""))
        elif inside_begin or not paragraph.strip():
            continue
        elif paragraph.startswith("=head"):
            blocks.append(Block("heading", tidy(_pod_inline(paragraph.split(None, 1)[1] if " " in paragraph else ""))))
        elif paragraph.startswith("=item"):
            term = tidy(_pod_inline(paragraph[5:])).lstrip("*").strip()
            blocks.append(Block("term", re.sub(r"^\d+\.?$", "", term)))
        elif not paragraph.startswith("="):
            blocks.append(Block("text", tidy(_pod_inline(paragraph))))
    return [block for block in blocks if block.text or block.kind == "gap"]


def text_blocks(source: str) -> list[Block]:
    """The text blocks of a plain text file: wrapped lines joined, a short line of its own is a term."""
    blocks: list[Block] = []
    for paragraph in re.split(r"\n\s*\n", source.expandtabs()):
        lines = textwrap.dedent(paragraph).strip("\n").splitlines()
        if not lines:
            continue
        kind: Kind = "text"
        joined = tidy(" ".join(line.strip() for line in lines))
        if len(lines) == 1 and len(joined) < 70 and not joined.endswith("."):
            kind = "term"
        if joined:
            blocks.append(Block(kind, joined))
    return blocks


_FUNCTION_WORDS = frozenset(
    """the of and to a in is it that for as with be by are on this not or can if from which an at will when you has have
    was but all may its must used using use do does no so than then there these they we one any only other some such
    into each been should would their your also between before after same more because how what where while were he
    his who i my me her she them had our""".split()
)


def is_prose(block: Block) -> bool:
    """Whether a text or item block reads as English sentences rather than as a table, a signature or code."""
    text = block.text
    words = re.findall(r"[A-Za-z']+", text)
    if len(words) < (5 if block.kind == "item" else 7) or len(text) < 30:
        return False
    letters = sum(map(len, words)) + text.count(" ")
    if letters < 0.84 * len(text):
        return False
    function_words = sum(word.lower() in _FUNCTION_WORDS for word in words)
    if function_words < 0.22 * len(words):
        return False
    if max(map(len, text.split())) > 60 or not re.search(r"[.:;!?][\"')]*$", text):
        return False
    return text[0].isalnum() or text[0] in "\"'(_`$-"


def prose(blocks: list[Block]) -> list[Block]:
    """Keeps prose blocks, and the headings and short terms that directly lead to one.

    A sentence that announces a listing which was left out ("For example:") goes with it, and so does text that only
    continues a sentence begun before a listing.
    """
    kept: list[Block] = []
    leading: list[Block] = []
    for block in blocks:
        if block.kind == "gap":
            if kept and kept[-1].text.endswith(":"):
                announcing = kept.pop()
                shortened = announcing._replace(
                    text=re.sub(r"(^|(?<=[.!?])) *(?:[^.!?]|[.!?](?! ))*:$", "", announcing.text)
                )
                if is_prose(shortened):
                    kept.append(shortened)
                else:
                    while kept and kept[-1].kind in ("heading", "term"):
                        leading.insert(0, kept.pop())
        elif block.kind == "heading":
            if 3 <= len(block.text) <= 90 and re.search(r"[A-Za-z]{3}", block.text):
                leading = [block]
        elif block.kind == "term":
            leading = [other for other in leading if other.kind == "heading"]
            if 2 <= len(block.text) <= 60:
                leading.append(block)
        elif is_prose(block) and not (block.kind == "text" and block.text[0].islower() and not leading):
            kept += [*leading, block]
            leading = []
        elif block.kind == "text" and len(block.text) > 30:
            leading = [other for other in leading if other.kind == "heading"]
    return kept


def render(blocks: list[Block]) -> str:
    """Blocks to text: a blank line between blocks, "- " before an item, items of a list on following lines."""
    lines: list[str] = []
    previous: Block | None = None
    for block in blocks:
        if previous and not (block.kind == "item" == previous.kind):
            lines.append("")
        lines.append(f"- {block.text}" if block.kind == "item" else block.text)
        previous = block
    return "\n".join(lines) + "\n" if lines else ""
