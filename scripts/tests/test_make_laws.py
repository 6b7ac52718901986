"""``python -m scripts.bench make-laws``: text of statutes in two languages, paired by labels."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from econmt.errors import InputError
from scripts.bench.make_laws import french_path, is_useful, make, pairs_of, parse
from tests.unit.cli.conftest import Call

Write = Callable[[dict[str, str]], Path]

ENGLISH = """<?xml version="1.0" encoding="utf-8"?>
<Statute xmlns:lims="http://justice.gc.ca/lims" xml:lang="en"><Identification><Chapter>9</Chapter>
<LongTitle>An Act respecting <Emphasis style="italic">lamps</Emphasis></LongTitle></Identification><Body>
<Heading level="1"><TitleText>Interpretation</TitleText></Heading>
<Section lims:id="7"><MarginalNote>Meaning of words</MarginalNote><Label>1</Label><Text>In this Act:</Text>
 <Definition><Text><DefinedTermEn>lamp</DefinedTermEn> means a thing that shines. (<DefinedTermFr>lampe</DefinedTermFr>)
 </Text></Definition>
 <Definition><Text><DefinedTermEn>wick</DefinedTermEn>, of a lamp, burns.\u2002(<DefinedTermFr>m\u00e8che</DefinedTermFr>)
 </Text><Paragraph><Label>(a)</Label><Text>of cotton;</Text></Paragraph></Definition>
 <HistoricalNote><HistoricalNoteSubItem>1999, c. 9</HistoricalNoteSubItem></HistoricalNote></Section>
<Section><Label>2</Label><Text><Repealed>[Repealed, 2001, c. 3]</Repealed></Text></Section>
<Section><Label>3</Label><Subsection><Label>(1)</Label><Text>See the <XRefExternal link="L-1">Lamp Oil Act</XRefExternal>
 first.</Text><Paragraph><Label>(a)</Label><Text>an oil lamp</Text></Paragraph>
 <ContinuedSectionSubsection><Text>or only in English</Text></ContinuedSectionSubsection>
 <Paragraph><Label>(b)</Label><Text>a lamp of gas</Text></Paragraph>
 <ContinuedSectionSubsection><Text>shines at night.</Text></ContinuedSectionSubsection></Subsection>
 <Subsection><Label>(2)</Label><Text>Only in English.</Text></Subsection></Section>
</Body><Schedule><Provision><Text>aa</Text></Provision><Provision><Text>a very long line of a list</Text></Provision>
</Schedule><Schedule><TableGroup><table><row><entry><Text>cell</Text></entry></row></table></TableGroup></Schedule>
<Order><Provision><Text>Oil the lamp.</Text></Provision><Provision><Text>Light it.</Text></Provision></Order></Statute>
"""
FRENCH = """\ufeff<?xml version="1.0" encoding="utf-8"?>
<Statute xmlns:lims="http://justice.gc.ca/lims" xml:lang="fr"><Identification><Chapter>9</Chapter>
<LongTitle>Loi concernant les lampes</LongTitle></Identification><Body>
<Heading level="1"><TitleText>D\u00e9finitions</TitleText></Heading>
<Section lims:id="8"><MarginalNote>Sens des mots</MarginalNote><Label>1</Label><Text>Dans la pr\u00e9sente loi\xa0:</Text>
 <Definition><Text><DefinedTermFr>m\u00e8che</DefinedTermFr> Ce qui br\u00fble. (<DefinedTermEn>wick</DefinedTermEn>)</Text>
 <Paragraph><Label>a)</Label><Text>de coton;</Text></Paragraph></Definition>
 <Definition><Text><DefinedTermFr>lampe</DefinedTermFr> Chose qui luit. (<DefinedTermEn>lamp</DefinedTermEn>)</Text>
 </Definition></Section>
<Section><Label>2</Label><Text><Repealed>[Abrog\u00e9, 2001, ch. 3]</Repealed></Text></Section>
<Section><Label>3</Label><Subsection><Label>(1)</Label><Text>Voir d\u2019abord la
 <XRefExternal link="L-1">Loi sur l\u2019huile</XRefExternal>.<FootnoteRef>a</FootnoteRef></Text>
 <Paragraph><Label>a)</Label><Text>une lampe \u00e0 huile</Text></Paragraph>
 <Paragraph><Label>b)</Label><Text>une lampe \u00e0 gaz</Text></Paragraph>
 <ContinuedSectionSubsection><Text>luit la nuit.</Text></ContinuedSectionSubsection></Subsection>
 <Subsection><Label>(3)</Label><Text>Seulement en fran\u00e7ais.</Text></Subsection></Section>
</Body><Schedule><Provision><Text>une tr\u00e8s longue ligne de la liste</Text></Provision><Provision><Text>zz</Text></Provision>
</Schedule><Schedule><TableGroup><table><row><entry><Text>case</Text></entry></row></table></TableGroup></Schedule>
<Order><Provision><Text>Huiler la lampe.</Text></Provision><Provision><Text>L\u2019allumer.</Text></Provision></Order></Statute>
"""
PAIRS = [
    ("An Act respecting lamps", "Loi concernant les lampes"),
    ("Interpretation", "D\u00e9finitions"),
    ("Meaning of words", "Sens des mots"),
    ("In this Act:", "Dans la pr\u00e9sente loi :"),
    ("lamp means a thing that shines.", "lampe Chose qui luit."),
    ("wick, of a lamp, burns.", "m\u00e8che Ce qui br\u00fble."),
    ("of cotton;", "de coton;"),
    ("", ""),
    ("See the Lamp Oil Act first.", "Voir d\u2019abord la Loi sur l\u2019huile."),
    ("an oil lamp", "une lampe \u00e0 huile"),
    ("a lamp of gas", "une lampe \u00e0 gaz"),
    ("shines at night.", "luit la nuit."),
    ("Oil the lamp.", "Huiler la lampe."),
    ("Light it.", "L\u2019allumer."),
]
"""All pairs of both documents; the schedule's list is in another order, and each language has a subsection more."""


def test_texts_are_paired_by_labels_and_terms() -> None:
    trees = [parse(text.encode(), "a.xml", each) for text, each in ((ENGLISH, "en"), (FRENCH, "fr"))]
    assert list(pairs_of(*trees)) == PAIRS


@pytest.mark.parametrize(
    ("english", "french"),
    [
        ("eng/acts/A-1.3.xml", "fra/lois/A-1.3.xml"),
        ("eng/regulations/SOR-99-1.xml", "fra/reglements/DORS-99-1.xml"),
        ("eng/regulations/SI-2004-2.xml", "fra/reglements/TR-2004-2.xml"),
        ("eng/regulations/C.R.C.,_c._10.xml", "fra/reglements/C.R.C.,_ch._10.xml"),
        ("eng/regulations/regs.txt", None),
        ("fra/lois/A-1.xml", None),
    ],
)
def test_names_of_both_languages(english: str, french: str | None) -> None:
    assert french_path(english) == french


@pytest.mark.parametrize(
    ("pair", "useful"),
    [
        (("a lamp", "une lampe"), True),
        (("a lamp", "a lamp"), False),
        (("", "une lampe"), False),
        (("1, 2", "une"), False),
        (("lamp" * 5, "l" * 80), True),  # 20 + 10 against 80 + 10 characters
        (("lamp" * 5, "l" * 81), False),
    ],
)
def test_useful_pairs(pair: tuple[str, str], useful: bool) -> None:
    assert is_useful(pair) is useful
    assert is_useful(pair[::-1]) is useful


@pytest.fixture
def checkout(tmp_path: Path) -> Write:
    """Writes files."""

    def write(files: dict[str, str]) -> Path:
        folder = tmp_path / "checkout"
        for name, text in files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return folder

    return write


def act(*texts: str) -> str:
    """Makes an act with a section for each text."""
    sections = (
        f"<Section><Label>{label}</Label><Text>{text}</Text></Section>" for label, text in enumerate(texts)
    )
    return f"<Statute><Body>{''.join(sections)}</Body></Statute>"


def laws(count: int) -> dict[str, str]:
    """Makes acts in both languages; each has a sentence that all have, and sentences of its own."""
    files = {}
    for number in range(count):
        own = [f"number {number} of part {part}" for part in range(3)]
        files[f"eng/acts/{number}.xml"] = act(
            "The same in all of them", "Short", *(f"Lamp {each}" for each in own)
        )
        files[f"fra/lois/{number}.xml"] = act(
            "Pareil en tous lieux", "Court", *(f"Lampe {each}" for each in own)
        )
    return files


def test_files_alone_are_named(checkout: Write, tmp_path: Path) -> None:
    lines = list(make(checkout({**laws(4), "eng/acts/alone.xml": act("a text")}), tmp_path / "text", 2))
    assert "eng/acts/alone.xml: has no translation, left out" in lines


def read(folder: Path, split: str) -> list[tuple[str, str]]:
    sides = [
        (folder / f"{split}.{language}").read_text(encoding="utf-8").splitlines() for language in ("en", "fr")
    ]
    return list(zip(*sides, strict=True))


def test_splits_are_from_documents_of_their_own(checkout: Write, tmp_path: Path) -> None:
    lines = list(make(checkout(laws(6)), tmp_path / "text", 5))
    valid, test, train = (read(tmp_path / "text", split) for split in ("valid", "test", "train"))
    assert (len(valid), len(test)) == (5, 5)
    # Four and one of two documents, three and two of the next two; the others have four each that were not held out.
    assert len(train) == 2 * 4
    assert lines[1:] == [
        f"{tmp_path / 'text' / 'valid'}: 5 pairs",
        f"{tmp_path / 'text' / 'test'}: 5 pairs",
        f"{tmp_path / 'text' / 'train'}: 8 pairs",
        "training text: 38 English and 38 French words",
        "left out: 2 pairs with a side that is in the validation or test text",
    ]
    held_out = {side for pair in valid + test for side in pair}
    assert held_out.isdisjoint(side for pair in train for side in pair)


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("<Statute><Body></Statute>", "not valid XML: mismatched tag: line 1, column 17"),
        (
            "<!DOCTYPE s [<!ENTITY a 'b'>]><s>&a;</s>",
            "declares entities, which is not allowed; remove the declarations",
        ),
    ],
)
def test_bad_xml_is_told_in_one_line(
    checkout: Write, tmp_path: Path, bench: Call, content: str, problem: str
) -> None:
    folder = checkout({**laws(1), "fra/lois/0.xml": content})
    ended = bench("make-laws", folder, tmp_path / "text")
    assert ended.code == 2
    assert ended.err == f"make-laws: fra/lois/0.xml: {problem}\n"


def test_too_few_documents_are_told(checkout: Write, tmp_path: Path) -> None:
    with pytest.raises(
        InputError, match="1 documents in both languages give no training text beside 4 pairs"
    ):
        list(make(checkout(laws(1)), tmp_path / "text"))
