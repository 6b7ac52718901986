#!/usr/bin/env bash
# Looks at the page of econmt profile --html in headless Chromium: it must draw itself without a network, tell no error,
# and answer to the keyboard. Screenshots, light and dark, are left for a person to look at.
#
#   scripts/check_page.sh PAGE.html [FOLDER]
#
# FOLDER (page-pictures if it is left out) gets light.png and dark.png. CHROMIUM names another browser.
set -euo pipefail

page=${1:?usage: scripts/check_page.sh PAGE.html [FOLDER]}
out=${2:-page-pictures}
browser=${CHROMIUM:-$(command -v chromium || command -v chromium-browser || command -v google-chrome)} || {
  echo "check_page: no Chromium here; install it (Debian: apt-get install chromium) or set CHROMIUM" >&2
  exit 1
}
mkdir -p "$out"
profile=$(mktemp -d)
trap 'rm -rf "$profile"' EXIT
# What the page does when used is tried in a copy, by a script at its end that leaves its findings in the title.
copy=$profile/page.html
python3 - "$page" "$copy" <<'EOF'
import sys

test = """
<script>
const findings = [];
addEventListener("error", (event) => findings.push("error: " + event.message));
const visible = () => [...document.querySelectorAll(".panel")].filter((panel) => !panel.hidden);
if (visible().length !== 1) findings.push(visible().length + " panels are shown at first");
const choices = document.querySelectorAll("input[name=technique]");
if (choices.length) {
  const last = choices[choices.length - 1];
  last.click();
  if (visible().length !== 1 || visible()[0].dataset.technique !== last.value) findings.push("choosing shows another panel");
  choices[0].click();
}
const slider = visible()[0].querySelector("input[type=range]");
slider.value = 500;
slider.dispatchEvent(new Event("input"));
if (!/(forward|backward|optimizer): [0-9.]+ [kMG]?B$/.test(visible()[0].querySelector("output").textContent))
  findings.push("the slider tells nothing");
document.getElementById("theme").click();
if (!document.documentElement.dataset.theme) findings.push("the theme does not change");
if (performance.getEntriesByType("resource").length) findings.push("something was loaded");
if (document.documentElement.scrollWidth > innerWidth) findings.push("the page is wider than the window");
const drawn = visible()[0].querySelectorAll("svg rect, svg path");
if ([...drawn].every((shape) => shape.getBoundingClientRect().width === 0)) findings.push("nothing is drawn");
document.title = "page-check: " + (findings.join("; ") || "good");
</script>
"""
text = open(sys.argv[1], encoding="utf-8").read()
open(sys.argv[2], "w", encoding="utf-8").write(text.replace("</body>", test + "</body>"))
EOF

run() {
  "$browser" --headless --no-sandbox --disable-gpu --disable-background-networking --no-first-run \
    --host-resolver-rules="MAP * ~NOTFOUND" --user-data-dir="$profile/data" --window-size=1400,2600 "$@" 2>/dev/null
}
found=$(run --dump-dom "file://$(realpath "$copy")" | sed -n 's/.*<title>page-check: \(.*\)<\/title>.*/\1/p')
address=file://$(realpath "$page")
run --screenshot="$(realpath "$out")/light.png" "$address"
run --screenshot="$(realpath "$out")/dark.png" --force-dark-mode --blink-settings=preferredColorScheme=0 "$address"
echo "page: ${found:-Chromium told nothing}; pictures in $out"
[ "$found" = good ]
