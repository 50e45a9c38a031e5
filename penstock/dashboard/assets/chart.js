// A chart of values over time, as SVG. Colours are the style sheet's, so that light and dark need nothing here.
//
// Points are [seconds since 1970, value of the first series, of the second, …], oldest first; a value that is
// not known is null, and the line has a gap there; so it has where two points are more than `gapSeconds` apart.
// Lines differ in their dashes, too. Stacked, each series stands on the one before it.
// Marks are [seconds since 1970, text]: a line each, whose text a pointer finds; `handles` puts a button on it.
import { NAMED } from "/_penstock/words.js";

const LEFT = 52;
const RIGHT = 10;
const TOP = 10;
const BOTTOM = 22;

export default {
  template: `
    <figure class="ps-chart" :class="{ 'ps-spark': !axes }" ref="box">
      <figcaption v-if="axes && series.length > 1" class="ps-legend">
        <span v-if="!named.length">None in this time</span>
        <span v-for="[it, at] in named" :key="it.label"><svg class="ps-key" width="20" height="10" aria-hidden="true">
          <rect v-if="stacked" width="20" height="10" :class="'ps-stack ps-fill-' + it.color" />
          <line x1="0" x2="20" y1="5" y2="5" :class="'ps-line ps-dash-' + at + ' ps-stroke-' + it.color" /></svg>{{ it.label }}
          <b>{{ at in latest ? words(latest[at]) : "–" }}</b></span>
      </figcaption>
      <svg role="img" :aria-label="spoken" :width="width" :height="height" :viewBox="'0 0 ' + width + ' ' + height"
           @pointermove="point" @pointerleave="at = null">
        <g v-if="axes" class="ps-axes">
          <g v-for="line in lines" :key="line.y">
            <line :x1="left" :x2="width - right" :y1="line.y" :y2="line.y" />
            <text :x="left - 8" :y="line.y" text-anchor="end" dominant-baseline="middle">{{ line.text }}</text>
          </g>
          <text v-for="it in times" :key="it.x" :x="it.x" :y="height - 5" :text-anchor="it.anchor">{{ it.text }}</text>
        </g>
        <g v-for="(path, at) in paths" :key="at">
          <path v-if="path.area" :d="path.area" :class="(stacked ? 'ps-stack' : 'ps-area') + ' ps-fill-' + series[at].color" />
          <path :d="path.line" :class="'ps-line ps-dash-' + at + ' ps-stroke-' + series[at].color" />
        </g>
        <line v-for="it in places" :key="it.x" class="ps-mark" :x1="it.x" :x2="it.x" :y1="top" :y2="height - bottom" />
        <line v-if="axes && cursor" class="ps-cursor" :x1="cursor.x" :x2="cursor.x" :y1="top" :y2="height - bottom" />
      </svg>
      <template v-if="handles">
        <button v-for="it in places" :key="it.x" type="button" class="ps-mark-handle" :style="{ left: it.x + 'px' }"
                :aria-label="it.texts.join('; ')" @focus="held = it" @blur="held = null" @pointerenter="held = it"
                @pointerleave="held = null"></button>
      </template>
      <div v-if="axes && (cursor || held)" class="ps-tip" :style="(held || cursor).style" aria-hidden="true">
        <template v-if="cursor && !held">
          <b>{{ cursor.time }}</b>
          <span v-for="[it, at] in named" :key="it.label"><i :class="'ps-fill-' + it.color"></i>{{ it.label }} {{ words(cursor.values[at]) }}</span>
        </template>
        <span v-for="text in (held || cursor).texts" :key="text" class="ps-tip-mark">{{ text }}</span>
      </div>
    </figure>
  `,
  props: {
    label: String,
    series: Array,
    height: Number,
    axes: Boolean,
    unit: String,
    kind: String,
    spanSeconds: Number,
    area: Boolean,
    stacked: Boolean,
    gapSeconds: Number,
    until: Number,
    handles: Boolean,
  },
  data() {
    return { points: [], marks: [], width: 120, at: null, held: null };
  },
  mounted() {
    this.observer = new ResizeObserver(() => {
      this.width = Math.max(40, Math.floor(this.$refs.box.clientWidth));
    });
    this.observer.observe(this.$refs.box);
  },
  unmounted() {
    this.observer.disconnect();
  },
  computed: {
    left() {
      if (!this.axes) return 1;
      return this.kind === "size" ? LEFT + 12 : LEFT;
    },
    right() {
      return this.axes ? RIGHT : 1;
    },
    top() {
      return this.axes ? TOP : 2;
    },
    bottom() {
      return this.axes ? BOTTOM : 2;
    },
    end() {
      if (this.until) return this.until;
      return this.points.length ? this.points[this.points.length - 1][0] : 0;
    },
    start() {
      return this.end - this.spanSeconds;
    },
    highest() {
      let most = 0;
      for (const point of this.heights) for (let at = 1; at < point.length; at += 1) most = Math.max(most, point[at] ?? 0);
      const isTime = this.kind === "age" || (this.kind === "duration" && most > 2);
      if (this.kind === "size") return niceSize(most);
      return isTime ? niceAge(most) : nice(most, this.kind === "count");
    },
    // Series and where they stand; stacked, only those that there is something of.
    named() {
      const all = this.series.map((it, at) => [it, at]);
      return this.stacked ? all.filter(([, at]) => this.points.some((it) => it[at + 1])) : all;
    },
    // Where the lines are: the values, or how high they stand together.
    heights() {
      if (!this.stacked) return this.points;
      return this.points.map(([time, ...values]) => {
        let sum = 0;
        return [time, ...values.map((it) => (it === null ? null : (sum += it)))];
      });
    },
    // Marks that would stand on each other are one.
    places() {
      const places = [];
      for (const [time, text] of this.marks) {
        if (time < this.start || time > this.end) continue;
        const x = this.x(time);
        const last = places[places.length - 1];
        if (last && x - last.x < 7) {
          if (last.texts.length < 5) last.texts.push(text);
          continue;
        }
        places.push({ x, texts: [text], style: this.beside(x) });
      }
      return places;
    },
    latest() {
      return this.points.length ? this.points[this.points.length - 1].slice(1) : [];
    },
    lines() {
      const shares = this.height < 120 ? [0, 1] : [0, 0.5, 1];
      return shares.map((share) => ({ y: this.y(this.highest * share), text: this.words(this.highest * share) }));
    },
    times() {
      if (!this.points.length) return [];
      const middle = this.width > 360 ? [0.5] : [];
      return [0, ...middle, 1].map((share) => ({
        x: this.left + share * (this.width - this.left - this.right),
        text: this.moment(this.start + share * this.spanSeconds) + (share === 1 ? " UTC" : ""),
        anchor: share === 0 ? "start" : share === 1 ? "end" : "middle",
      }));
    },
    paths() {
      const drawn = new Set(this.named.map((it) => it[1]));
      return this.series.map((_, at) => {
        if (!drawn.has(at)) return { line: "", area: "" };
        let line = "";
        let area = "";
        let run = [];
        const close = () => {
          if (!run.length) return;
          const steps = run.map(([x, y]) => `${x} ${y}`).join("L");
          line += `M${steps}`;
          // Of one point alone nothing would be seen.
          if (run.length === 1) line += "h0.1";
          const below = run.map((it) => `${it[0]} ${it[2]}`).reverse().join("L");
          if (this.area || this.stacked) area += `M${steps}L${below}Z`;
          run = [];
        };
        let before = null;
        for (const point of this.heights) {
          const value = point[at + 1];
          if (this.gapSeconds && before !== null && point[0] - before > this.gapSeconds) close();
          before = point[0];
          const below = this.stacked && at ? point[at] : 0;
          if (value === null || value === undefined) close();
          else run.push([this.x(point[0]), this.y(value), this.y(below)]);
        }
        close();
        return { line, area };
      });
    },
    cursor() {
      if (this.at === null || !this.points.length) return null;
      const point = this.points.reduce((best, it) => (Math.abs(it[0] - this.at) < Math.abs(best[0] - this.at) ? it : best));
      const x = this.x(point[0]);
      const near = this.places.find((it) => Math.abs(it.x - this.x(this.at)) < 5);
      const time = `${this.moment(point[0])} UTC`;
      return { x, style: this.beside(x), time, values: point.slice(1), texts: near ? near.texts : [] };
    },
    spoken() {
      if (!this.points.length) return `${this.label}: nothing yet`;
      const now = this.named.map(([it, at]) => `${it.label} ${this.words(this.latest[at])}`).join(", ") || "none";
      return `${this.label}: now ${now}; highest ${this.words(this.highest)}`;
    },
  },
  methods: {
    // --- what the broker's side calls ---
    load(points) {
      this.points = points;
      this.trim();
    },
    putMarks(marks) {
      this.marks = marks;
    },
    push(points) {
      this.points = this.points.concat(points);
      this.trim();
    },
    trim() {
      const gone = this.points.findIndex((it) => it[0] >= this.start);
      if (gone > 0) this.points = this.points.slice(gone);
    },
    // --- places ---
    x(time) {
      const share = (time - this.start) / this.spanSeconds;
      return round(this.left + share * (this.width - this.left - this.right));
    },
    y(value) {
      const room = this.height - this.top - this.bottom;
      return round(this.top + room * (1 - value / this.highest));
    },
    beside(x) {
      return x > this.width / 2 ? { right: `${this.width - x + 10}px` } : { left: `${x + 10}px` };
    },
    moment(time) {
      if (this.spanSeconds <= 86400) return NAMED.clock(time);
      return new Date(time * 1000).toISOString().slice(5, 16).replace("T", " ");
    },
    point(event) {
      const x = event.clientX - event.currentTarget.getBoundingClientRect().left;
      this.at = this.start + ((x - this.left) / (this.width - this.left - this.right)) * this.spanSeconds;
    },
    words(value) {
      if (value === null || value === undefined) return "–";
      if (value === 0 && this.kind === "age") return "0 s";
      return NAMED[this.kind](value) + this.unit;
    },
  },
};

// The next number above it that people like to see on an axis.
function nice(value, whole) {
  if (!(value > 0)) return whole ? 4 : 1;
  const power = 10 ** Math.floor(Math.log10(value));
  const step = [1, 2, 4, 5, 10].find((it) => it * power >= value * 1.02) ?? 20;
  return whole ? Math.max(2, step * power) : step * power;
}

// The same for seconds, so that half of it is a whole number of seconds, minutes, hours or days, too.
function niceAge(seconds) {
  const steps = [4, 10, 20, 30, 60, 120, 240, 600, 1200, 1800, 3600, 7200, 14400, 28800, 43200, 86400];
  return steps.find((it) => it >= seconds * 1.02) ?? nice(seconds / 86400, true) * 86400;
}

// The same for bytes.
function niceSize(bytes) {
  const unit = 1024 ** Math.max(Math.floor(Math.log(Math.max(bytes, 1)) / Math.log(1024)), 0);
  return nice(bytes / unit, true) * unit;
}

function round(value) {
  return Math.round(value * 10) / 10;
}
