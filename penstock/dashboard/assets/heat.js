// A heat map: how many took how long, over time. A column is a step of time, a row a range of seconds, the shortest
// at the bottom; the more there were, the fuller the colour. What a cell says in figures, the pointer finds.
import { NAMED } from "/_penstock/words.js";

const LEFT = 96;
const RIGHT = 10;
const TOP = 6;
const BOTTOM = 22;

export default {
  template: `
    <figure class="ps-chart ps-heat" ref="box">
      <figcaption class="ps-legend">
        <span v-if="most">1<span class="ps-heat-scale" aria-hidden="true"></span>{{ count(most) }} messages</span>
        <span v-else>Nothing was handed out in this time.</span>
      </figcaption>
      <svg role="img" :aria-label="spoken" :width="width" :height="height" :viewBox="'0 0 ' + width + ' ' + height"
           @pointermove="point" @pointerleave="at = null">
        <g class="ps-axes">
          <g v-for="(text, row) in rows" :key="text">
            <line :x1="left" :x2="width - right" :y1="y(row)" :y2="y(row)" />
            <text :x="left - 8" :y="y(row) - rowHeight / 2" text-anchor="end" dominant-baseline="middle">{{ text }}</text>
          </g>
          <text v-for="it in times" :key="it.x" :x="it.x" :y="height - 5" :text-anchor="it.anchor">{{ it.text }}</text>
        </g>
        <rect v-for="it in cells" :key="it.key" :x="it.x" :y="it.y" :width="it.width" :height="rowHeight - 1"
              :fill-opacity="it.opacity" />
      </svg>
      <div v-if="tip" class="ps-tip" :style="tip.style" aria-hidden="true">
        <b>{{ tip.time }}</b><span>{{ tip.text }}</span>
      </div>
    </figure>
  `,
  props: { label: String, height: Number },
  data() {
    return { rows: [], columns: [], stepSeconds: 10, spanSeconds: 300, end: 0, width: 120, at: null };
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
    left: () => LEFT,
    right: () => RIGHT,
    start() {
      return this.end - this.spanSeconds;
    },
    rowHeight() {
      return (this.height - TOP - BOTTOM) / Math.max(this.rows.length, 1);
    },
    most() {
      return Math.max(0, ...this.columns.map((it) => Math.max(0, ...it[1])));
    },
    cells() {
      const cells = [];
      for (const [time, counts] of this.columns) {
        const from = Math.max(this.x(this.began(time)), LEFT);
        const to = this.x(time);
        if (to <= from) continue;
        counts.forEach((count, row) => {
          if (!count) return;
          // By the logarithm: one message among thousands is to be seen, too.
          const opacity = 0.12 + 0.88 * (Math.log(1 + count) / Math.log(1 + this.most));
          const width = Math.max(to - from - 0.5, 1);
          cells.push({ key: `${time}/${row}`, x: from, y: this.y(row) - this.rowHeight + 0.5, width, opacity });
        });
      }
      return cells;
    },
    times() {
      const middle = this.width > 420 ? [0.5] : [];
      if (!this.rows.length) return [];
      return [0, ...middle, 1].map((share) => ({
        x: LEFT + share * (this.width - LEFT - RIGHT),
        text: this.moment(this.start + share * this.spanSeconds) + (share === 1 ? " UTC" : ""),
        anchor: share === 0 ? "start" : share === 1 ? "end" : "middle",
      }));
    },
    tip() {
      if (this.at === null) return null;
      const column = this.columns.find((it) => this.at.time <= it[0] && this.at.time > this.began(it[0]));
      const row = Math.floor((this.height - BOTTOM - this.at.y) / this.rowHeight);
      if (!column || !(row in this.rows)) return null;
      const x = this.x(column[0]);
      const style = x > this.width / 2 ? { right: `${this.width - x + 10}px` } : { left: `${x + 10}px` };
      return { style, time: `${this.moment(column[0])} UTC`, text: `${this.rows[row]}: ${this.count(column[1][row])}` };
    },
    spoken() {
      if (!this.most) return `${this.label}: nothing yet`;
      const sums = this.rows.map((_, row) => this.columns.reduce((sum, it) => sum + it[1][row], 0));
      const total = sums.reduce((sum, it) => sum + it, 0);
      const parts = this.rows.map((text, row) => [text, sums[row]]).filter((it) => it[1]);
      return `${this.label}: ${parts.map(([text, sum]) => `${text} ${Math.round((100 * sum) / total)} %`).join(", ")}`;
    },
  },
  methods: {
    load(rows, columns, stepSeconds, spanSeconds, end) {
      Object.assign(this, { rows, columns, stepSeconds, spanSeconds, end });
    },
    x(time) {
      const share = (time - this.start) / this.spanSeconds;
      return Math.round(10 * (LEFT + share * (this.width - LEFT - RIGHT))) / 10;
    },
    // Where the step begins that ends there: the last one may not be over.
    began(time) {
      return (Math.ceil(time / this.stepSeconds) - 1) * this.stepSeconds;
    },
    y(row) {
      return this.height - BOTTOM - row * this.rowHeight;
    },
    point(event) {
      const box = event.currentTarget.getBoundingClientRect();
      const share = (event.clientX - box.left - LEFT) / (this.width - LEFT - RIGHT);
      this.at = { time: this.start + share * this.spanSeconds, y: event.clientY - box.top };
    },
    moment(time) {
      if (this.spanSeconds <= 86400) return NAMED.clock(time);
      return new Date(time * 1000).toISOString().slice(5, 16).replace("T", " ");
    },
    count(value) {
      return NAMED.count(value);
    },
  },
};
