// Order of the search results: pages for users first, then references, figures, and pages for those who change econmt.
var Scorer = {
  score: ([docname, title, anchor, descr, score]) => {
    if (docname === "CHANGELOG" || docname === "CONTRIBUTING" || docname === "docs/design") return score / 8;
    if (docname === "docs/api" || /^(docs\/(results|recipes|commands)|ops|memory|runtime|scripts)\b/.test(docname)) return score / 4;
    return score;
  },
  objNameMatch: 4,
  objPartialMatch: 2,
  objPrio: { 0: 5, 1: 0, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};
