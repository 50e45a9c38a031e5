// A chart of values over time, as SVG. Colours are the style sheet's, so that light and dark need nothing here.
//
// Points are [seconds since 1970, value of the first series, of the second, …], oldest first; a value that is
// not known is null, and the line has a gap there.
import { NAMED } from "/_penstock/words.js";

const LEFT = 52;
const RIGHT = 10;
const TOP = 10;
const BOTTOM = 22;

export default {
  template: `
    <figure class="ps-chart" :class="{ 'ps-spark': !axes }" ref="box">
      <figcaption v-if="axes && series.length > 1" class="ps-legend">
        <span v-for="(it, at) in series" :key="it.label"><i :class="'ps-fill-' + it.color"></i>{{ it.label }}
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
          <path v-if="path.area" :d="path.area" :class="'ps-area ps-fill-' + series[at].color" />
          <path :d="path.line" :class="'ps-line ps-stroke-' + series[at].color" />
        </g>
        <line v-if="axes && cursor" class="ps-cursor" :x1="cursor.x" :x2="cursor.x" :y1="top" :y2="height - bottom" />
      </svg>
      <div v-if="axes && cursor" class="ps-tip" :style="cursor.style" aria-hidden="true">
        <b>{{ cursor.time }}</b>
        <span v-for="(it, at) in series" :key="it.label"><i :class="'ps-fill-' + it.color"></i>{{ it.label }} {{ words(cursor.values[at]) }}</span>
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
  },
  data() {
    return { points: [], width: 120, at: null };
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
      return this.axes ? LEFT : 1;
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
      return this.points.length ? this.points[this.points.length - 1][0] : 0;
    },
    start() {
      return this.end - this.spanSeconds;
    },
    highest() {
      let most = 0;
      for (const point of this.points) for (let at = 1; at < point.length; at += 1) most = Math.max(most, point[at] ?? 0);
      return this.kind === "age" ? niceAge(most) : nice(most, this.kind === "count");
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
        text: NAMED.clock(this.start + share * this.spanSeconds) + (share === 1 ? " UTC" : ""),
        anchor: share === 0 ? "start" : share === 1 ? "end" : "middle",
      }));
    },
    paths() {
      return this.series.map((_, at) => {
        let line = "";
        let area = "";
        let run = [];
        const close = () => {
          if (!run.length) return;
          const steps = run.map(([x, y]) => `${x} ${y}`).join("L");
          line += `M${steps}`;
          if (this.area) area += `M${run[0][0]} ${this.y(0)}L${steps}L${run[run.length - 1][0]} ${this.y(0)}Z`;
          run = [];
        };
        for (const point of this.points) {
          const value = point[at + 1];
          if (value === null || value === undefined) close();
          else run.push([this.x(point[0]), this.y(value)]);
        }
        close();
        return { line, area };
      });
    },
    cursor() {
      if (this.at === null || !this.points.length) return null;
      const point = this.points.reduce((best, it) => (Math.abs(it[0] - this.at) < Math.abs(best[0] - this.at) ? it : best));
      const x = this.x(point[0]);
      const style = x > this.width / 2 ? { right: `${this.width - x + 10}px` } : { left: `${x + 10}px` };
      return { x, style, time: `${NAMED.clock(point[0])} UTC`, values: point.slice(1) };
    },
    spoken() {
      if (!this.points.length) return `${this.label}: nothing yet`;
      const now = this.series.map((it, at) => `${it.label} ${this.words(this.latest[at])}`).join(", ");
      return `${this.label}: now ${now}; highest ${this.words(this.highest)}`;
    },
  },
  methods: {
    // --- what the broker's side calls ---
    load(points) {
      this.points = points;
      this.trim();
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

function round(value) {
  return Math.round(value * 10) / 10;
}
