// A payload in its forms: JSON with colours that folds, text, hexadecimal digits.
//
// JSON is laid out here, token by token, and never read into values: numbers, escapes and fields that are there
// twice stay as they are. It is known to be right. However much it is, few lines of it are in the document: what is
// folded makes one, and there is a button for more. Nothing here calls itself, so that no depth is too deep.
import { NAMED } from "/_penstock/words.js";

const LINES = 500; // at first, and with each click for more
const OPEN_LINES_MAX = 1000; // of what has more, all below the first level is folded at first
const STRING_MAX = 2000;
const PADS_MAX = 40; // levels that are set off

const TOKEN = /"(?:[^"\\]|\\[^])*"|[{}[\],:]|[^\s{}[\],:"]+/g;

// Where each token begins and ends; of a bracket that opens, where it closes and how many are in it.
function read(text) {
  const starts = [];
  const ends = [];
  const closes = [];
  const counts = [];
  const open = [];
  for (const { 0: token, index } of text.matchAll(TOKEN)) {
    const at = starts.length;
    starts.push(index);
    ends.push(index + token.length);
    closes.push(-1);
    counts.push(0);
    const last = open[open.length - 1];
    if (token === "{" || token === "[") open.push(at);
    else if (token === "}" || token === "]") {
      closes[last] = at;
      if (at > last + 1) counts[last] += 1;
      open.pop();
    } else if (token === "," && open.length) counts[last] += 1;
  }
  return { starts, ends, closes, counts };
}

export default {
  template: `
    <div class="ps-payload-box"><div class="ps-bar">
      <div class="ps-choice ps-local" role="group" aria-label="Show it as">
        <button v-for="it in forms" :key="it.key" type="button" :data-choice="it.key" :aria-pressed="String(it.key === form)" @click="form = it.key">{{ it.label }}</button>
      </div>
      <span class="ps-help">{{ about }}</span>
      <span class="ps-actions ps-apart">
        <span v-if="form === 'json'" class="ps-local">
          <button type="button" class="ps-button ps-quiet" @click="foldAll()">Fold all</button>
          <button type="button" class="ps-button ps-quiet" @click="folded = new Set()">Unfold all</button>
        </span>
        <button v-if="copies" type="button" class="ps-button" @click="$emit('copy')">Copy</button>
      </span>
    </div>
    <pre v-if="form !== 'json'" class="ps-payload" :data-form="form" tabindex="0" role="group" aria-label="Payload">{{ shown.text || "(empty)" }}</pre>
    <div v-else class="ps-payload ps-json ps-local" data-form="json" tabindex="0" role="group" aria-label="Payload"><div
        v-for="line in page.lines" :key="line.key"><button v-if="line.node >= 0" type="button" :aria-expanded="String(!line.folded)"
        :aria-label="(line.folded ? 'Unfold ' : 'Fold ') + line.name" @click="fold(line.node)"></button>{{ line.pad }}<span
        v-for="(part, at) in line.parts" :key="at" :class="part[0] && 'ps-json-' + part[0]">{{ part[1] }}<button v-if="part[2]" type="button"
        class="ps-json-more" @click="whole.add(part[3])">{{ part[2] }}</button></span></div></div>
    <p v-if="form === 'json' && page.more" class="ps-bar ps-local"><button type="button" class="ps-button" @click="limit += LINES">Show more lines</button></p>
    <p v-if="shown.note" class="ps-help ps-note">{{ shown.note }}</p></div>
  `,
  props: { forms: Array, about: String, copies: Boolean },
  emits: ["copy", "copied", "uncopied"],
  data() {
    return { form: this.forms[0].key, folded: new Set(), whole: new Set(), limit: LINES, LINES };
  },
  created() {
    this.begin();
  },
  watch: {
    forms() {
      if (!this.forms.some((it) => it.key === this.form)) this.form = this.forms[0].key;
      this.whole = new Set();
      this.limit = LINES;
      this.begin();
    },
  },
  computed: {
    shown() {
      return this.forms.find((it) => it.key === this.form) ?? this.forms[0];
    },
    source() {
      return this.forms.find((it) => it.key === "json")?.text ?? "";
    },
    tokens() {
      return Object.freeze(read(this.source));
    },
    page() {
      const { starts, ends, closes, counts } = this.tokens;
      const text = (at) => this.source.slice(starts[at], ends[at]);
      const lines = [];
      let depth = 0;
      let line = null;
      const begin = (key) => {
        line = { key, pad: "  ".repeat(Math.min(depth, PADS_MAX)), parts: [], node: -1, folded: false, name: "it" };
      };
      begin(0);
      let at = 0;
      for (; at < starts.length && lines.length < this.limit; at += 1) {
        const token = text(at);
        if (token === "{" || token === "[") {
          if (closes[at] === at + 1) {
            line.parts.push(["", token + text(at + 1)]);
            at += 1;
            continue;
          }
          line.node = at;
          if (this.folded.has(at)) {
            const fields = token === "{" ? "field" : "item";
            line.folded = true;
            line.parts.push(["", token], ["count", ` ${NAMED.count(counts[at])} ${fields}${counts[at] === 1 ? "" : "s"} `], ["", text(closes[at])]);
            at = closes[at];
            continue;
          }
          line.parts.push(["", token]);
          lines.push(line);
          depth += 1;
          begin(at + 1);
        } else if (token === "}" || token === "]") {
          lines.push(line);
          depth -= 1;
          begin(at);
          line.parts.push(["", token]);
        } else if (token === ",") {
          line.parts.push(["", ","]);
          lines.push(line);
          begin(at + 1);
        } else if (token === ":") {
          line.name = line.parts[0][1];
          line.parts.push(["", ": "]);
        } else {
          line.parts.push(this.part(at, token, text(at + 1) === ":"));
        }
      }
      const more = at < starts.length;
      if (!more) lines.push(line);
      return { lines, more };
    },
  },
  methods: {
    part(at, token, isKey) {
      const kind = token[0] === '"' ? (isKey ? "key" : "text") : /^[-\d]/.test(token) ? "number" : "word";
      if (token.length <= STRING_MAX || this.whole.has(at)) return [kind, token];
      return [kind, token.slice(0, STRING_MAX), `… ${NAMED.count(token.length - STRING_MAX)} more characters`, at];
    },
    // What is large is folded below its first level, and what is in it as well, until it is opened.
    begin() {
      const { starts } = this.tokens;
      this.folded = new Set();
      let lines = 0;
      for (const at of starts) if (/[,[{]/.test(this.source[at])) lines += 1;
      if (lines > OPEN_LINES_MAX) this.foldAll();
    },
    foldAll() {
      const { starts, closes } = this.tokens;
      const folded = new Set();
      for (let at = 1; at < starts.length; at += 1) if (closes[at] > at + 1) folded.add(at);
      this.folded = folded;
    },
    fold(node) {
      if (!this.folded.delete(node)) this.folded.add(node);
    },
    // --- what the broker's side calls: the payload as it was sent ---
    async copy(text) {
      try {
        await navigator.clipboard.writeText(text);
      } catch {
        // Only pages that come over TLS, or from this machine, have the one above.
        const field = Object.assign(document.createElement("textarea"), { value: text });
        document.body.append(field);
        field.select();
        const done = document.execCommand("copy");
        field.remove();
        if (!done) {
          this.$emit("uncopied");
          return;
        }
      }
      this.$emit("copied");
    },
  },
};
