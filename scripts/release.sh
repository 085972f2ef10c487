#!/usr/bin/env bash
# Set the version, where it stands: bash scripts/release.sh VERSION. Commit, tag and push are yours, as it prints.
# Changes pyproject.toml, CITATION.cff and the heading of what is unreleased in CHANGELOG.md.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

refuse() {
    echo "$1" >&2
    exit 2
}

version="${1:-}"
[[ "$version" =~ ^[0-9]+\.[0-9]+\.[0-9]+(rc[0-9]+)?$ ]] || refuse "'$version' is no version: give 1.2.3, or 1.2.3rc1"
old="$(sed -n 's/^version = "\(.*\)"$/\1/p' pyproject.toml)"
# of 1.2.3 and 1.2.3rc1 the second is the older one: sort -V takes what follows ~ so
newest="$(printf '%s\n' "${old/rc/\~rc}" "${version/rc/\~rc}" | sort -V | tail -n 1)"
[ "$version" != "$old" ] && [ "$newest" = "${version/rc/\~rc}" ] || refuse "$version does not follow $old, the version now"
[ -z "$(git status --porcelain)" ] || refuse "there are changes that are not committed: commit or stash them first"
[ -z "$(git tag --list "v$version")" ] || refuse "the tag v$version exists: give the next version"
notes="$(sed -n '/^## Unreleased$/,/^## [0-9]/p' CHANGELOG.md | grep '^- ' || true)"
[ -n "$notes" ] || refuse "CHANGELOG.md has no line under Unreleased: nothing to release"

today="$(date +%F)"
sed -i "s/^version = \".*\"$/version = \"$version\"/" pyproject.toml
sed -i -e '/^date-released: /d' -e "s/^version: .*$/version: $version\ndate-released: \"$today\"/" CITATION.cff
sed -i "s/^## Unreleased$/## Unreleased\n\n## $version ($today)/" CHANGELOG.md
git --no-pager diff --stat
echo "then: bash scripts/test.sh && git commit -am 'Release $version' && git tag v$version && git push --follow-tags"
