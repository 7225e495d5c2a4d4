"""A report page as a test reads it."""

from html.parser import HTMLParser

VOID = {"meta", "img", "input"}


class Page(HTMLParser):
    """Tags, attributes and visible text; asserts that tags are balanced."""

    def __init__(self, html):
        super().__init__()
        self.tags, self.stack, self.text, self.src = [], [], "", []
        self.feed(html)
        self.text = " ".join(self.text.split())
        assert self.stack == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.src += [value for name, value in attrs if name in ("src", "href", "data", "srcset")]
        assert not any(name.startswith("on") for name, _ in attrs)
        if tag not in VOID:
            self.stack.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)

    def handle_endtag(self, tag):
        assert self.stack.pop() == tag

    def handle_data(self, data):
        if self.stack and self.stack[-1] not in ("style", "script", "title"):
            self.text += data
