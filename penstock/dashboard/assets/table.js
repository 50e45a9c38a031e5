// A table that lives: the broker sends rows and what changes in them; sorting, searching and paging happen here.
//
// Only the rows of one page are in the document. While the pointer or the keyboard is in the table, rows keep
// their places, so that nobody clicks on what has just moved; figures go on changing.
import { NAMED } from "/_penstock/words.js";

const REORDER_MS = 3000;
const AGES_MS = 1000;
const NUMBERS = new Set(["count", "rate", "age", "since", "size"]);

export default {
  template: `
    <div class="ps-live" @keydown.down="walk($event, 1)" @keydown.up="walk($event, -1)" :class="{ 'ps-live-loading': !loaded }">
      <div v-if="search || sortable.length > 1" class="ps-live-bar" v-show="total > 0">
        <label v-if="search" class="ps-search">
          <span class="ps-hidden">{{ search }}</span>
          <input type="search" data-ps-search :placeholder="search" :value="query" @input="find($event.target.value)"
                 @keydown.esc="find('')" @keydown.enter="open()" autocomplete="off" spellcheck="false" aria-keyshortcuts="/" />
          <kbd aria-hidden="true">/</kbd>
        </label>
        <label class="ps-sort">
          <span>Sort by</span>
          <select :value="sort" @change="sortBy($event.target.value)">
            <template v-for="column in sortable" :key="column.key">
              <option :value="first(column)">{{ column.label }} {{ hint(column, first(column)) }}</option>
              <option :value="second(column)">{{ column.label }} {{ hint(column, second(column)) }}</option>
            </template>
          </select>
        </label>
        <label v-for="it in filters" :key="it.key" class="ps-filter">
          <span>{{ it.label }}</span>
          <select :value="chosen[it.key]" @change="choose(it.key, $event.target.value)">
            <option value="">All</option>
            <option v-for="option in it.options" :key="option[0]" :value="option[0]">{{ option[1] }}</option>
          </select>
        </label>
        <p class="ps-live-count" role="status">{{ summary }}</p>
        <slot name="bar"></slot>
      </div>
      <div v-if="total > 0 && matching > 0" class="ps-table-box">
        <table class="ps-table ps-live-table" role="table" :aria-label="caption" :aria-rowcount="matching">
          <thead role="rowgroup">
            <tr role="row">
              <th v-if="selectable" role="columnheader" scope="col" class="ps-pick"><input type="checkbox" aria-label="All that are shown"
                  :checked="visible.length && visible.every((it) => picked.has(it[rowKey]))" @change="pickAll($event.target.checked)" /></th>
              <th v-for="column in columns" :key="column.key" role="columnheader" scope="col" :class="cellClass(column)"
                  :aria-sort="ariaSort(column)" :title="column.help || undefined" @click="column.sortable && toggle(column)">
                <button v-if="column.sortable" type="button">
                  {{ column.label }}<span v-if="column.unit" class="ps-unit">{{ column.unit }}</span><i aria-hidden="true"></i>
                </button>
                <template v-else>{{ column.label }}</template>
              </th>
            </tr>
          </thead>
          <tbody role="rowgroup" @pointerenter="hold(true)" @pointerleave="hold(false)"
                 @focusin="hold(true)" @focusout="hold(false)">
            <tr v-for="row in visible" :key="row[rowKey]" role="row" :class="row.row_class" :data-key="row[rowKey]">
              <td v-if="selectable" role="cell" class="ps-pick"><input type="checkbox" :aria-label="'Select ' + row[rowKey]"
                  :checked="picked.has(row[rowKey])" @click="pick($event, row[rowKey])" /></td>
              <component :is="column.head ? 'th' : 'td'" v-for="column in columns" :key="column.key"
                  :role="column.head ? 'rowheader' : 'cell'" :scope="column.head ? 'row' : undefined"
                  :class="[cellClass(column), quiet(column, row)]" :data-label="column.label" :data-column="column.key">
                <template v-if="column.kind === 'link'">
                  <a :href="row.href">{{ row[column.key] }}</a>
                  <span v-for="it in row[column.badges] || []" :key="it[0]" class="ps-badge" :class="it[1] && 'ps-' + it[1]">{{ it[0] }}</span>
                </template>
                <template v-else-if="column.kind === 'badges'">
                  <span v-for="it in row[column.key]" :key="it[0]" class="ps-badge" :class="it[1] && 'ps-' + it[1]">{{ it[0] }}</span>
                </template>
                <template v-else-if="column.kind === 'links'">
                  <span v-for="(it, at) in row[column.key]" :key="at" class="ps-item">
                    <a v-if="it[1]" :href="it[1]">{{ it[0] }}</a><template v-else>{{ it[0] }}</template>
                    <span v-if="it[2]" class="ps-badge">{{ it[2] }}</span>
                  </span>
                  <span v-if="!row[column.key].length" class="ps-zero">–</span>
                </template>
                <template v-else>{{ text(column, row) }}</template>
              </component>
            </tr>
          </tbody>
        </table>
      </div>
      <div v-if="loaded && total > 0 && matching === 0" class="ps-empty">
        <p>Nothing here matches<template v-if="query"> “{{ query }}”</template>.</p>
        <button type="button" class="ps-button" @click="showAll()">Show all</button>
      </div>
      <nav v-if="pages > 1" class="ps-pager" :aria-label="caption + ', pages'">
        <button type="button" class="ps-button" :disabled="page === 0" @click="turn(page - 1)">Previous</button>
        <span>{{ range }}</span>
        <button type="button" class="ps-button" :disabled="page >= pages - 1" @click="turn(page + 1)">Next</button>
      </nav>
      <div v-if="loaded && total === 0"><slot></slot></div>
    </div>
  `,
  props: {
    caption: String,
    columns: Array,
    rowKey: String,
    noun: String,
    search: String,
    searched: Array,
    filters: Array,
    initialSort: String,
    pageRows: Number,
    urlState: Boolean,
    selectable: Boolean,
  },
  emits: ["pick"],
  data() {
    const url = new URL(location.href).searchParams;
    const asked = this.urlState ? url.get("sort") : null;
    const known = this.columns.some((it) => it.sortable && (it.key === asked || `-${it.key}` === asked));
    return {
      loaded: false,
      total: 0,
      matching: 0,
      page: this.urlState ? Math.max(0, (parseInt(url.get("page"), 10) || 1) - 1) : 0,
      query: (this.urlState && url.get("q")) || "",
      sort: known ? asked : this.initialSort,
      chosen: Object.fromEntries(this.filters.map((it) => [it.key, (this.urlState && url.get(it.key)) || ""])),
      visible: [],
      picked: new Set(),
    };
  },
  created() {
    // These are not for Vue to watch: there may be very many.
    this.rows = new Map();
    this.order = [];
    this.held = 0;
    this.stale = false; // the order is not what it would be now
  },
  mounted() {
    this.timers = [
      setInterval(() => this.stale && !this.held && this.arrange(), REORDER_MS),
      setInterval(() => this.show(), AGES_MS),
    ];
  },
  unmounted() {
    this.timers.forEach(clearInterval);
  },
  computed: {
    sortable() {
      return this.columns.filter((it) => it.sortable);
    },
    pages() {
      return Math.ceil(this.matching / this.pageRows);
    },
    range() {
      const start = this.page * this.pageRows;
      const end = Math.min(start + this.pageRows, this.matching);
      return `${NAMED.count(start + 1)}–${NAMED.count(end)} of ${NAMED.count(this.matching)}`;
    },
    summary() {
      const all = `${NAMED.count(this.total)} ${this.noun}${this.total === 1 ? "" : "s"}`;
      return this.query || this.filters.some((it) => this.chosen[it.key]) ? `${NAMED.count(this.matching)} of ${all}` : all;
    },
  },
  methods: {
    // --- what the broker's side calls ---
    load(rows) {
      this.rows.clear();
      if (this.picked.size) this.pickAll(false);
      this.loaded = true;
      this.put(rows);
      this.arrange();
    },
    patch(rows) {
      if (this.put(rows)) {
        this.arrange();
      } else {
        this.stale = true;
        this.show();
      }
    },
    drop(keys) {
      keys.forEach((key) => this.rows.delete(key));
      if (keys.filter((key) => this.picked.delete(key)).length) this.tellPicked();
      this.arrange();
    },
    put(rows) {
      let isNew = false;
      for (const row of rows) {
        const key = row[this.rowKey];
        const before = this.rows.get(key);
        if (!before) isNew = true;
        const now = before ? { ...before, ...row } : row;
        if (!before || this.searched.some((it) => now[it] !== before[it])) {
          now._text = this.searched.map((it) => String(now[it] ?? "")).join("\n").toLowerCase();
        }
        this.rows.set(key, now);
      }
      return isNew;
    },
    // --- what is shown, in which order ---
    arrange() {
      const wanted = this.query.trim().toLowerCase();
      const found = [];
      const chosen = Object.entries(this.chosen).filter((it) => it[1]);
      for (const [key, row] of this.rows) {
        if ((!wanted || row._text.includes(wanted)) && chosen.every(([field, value]) => row[field] === value)) found.push(key);
      }
      const down = this.sort.startsWith("-");
      const by = this.sort.replace(/^-/, "");
      const column = this.columns.find((it) => it.key === by);
      const value = (key) => {
        const it = this.rows.get(key)[column?.sort || by];
        return Array.isArray(it) ? it.map((one) => one[0]).join() : it;
      };
      // The older the moment, the greater the age.
      const sign = (down ? -1 : 1) * (column?.kind === "since" ? -1 : 1);
      const compare = (a, b) => (typeof a === "string" ? a.localeCompare(b, "en", { numeric: true }) : a - b);
      const values = new Map(found.map((key) => [key, value(key) ?? null]));
      found.sort((one, two) => {
        const a = values.get(one);
        const b = values.get(two);
        // What has no value stands last, whichever way the rest goes.
        const missing = (a === null) - (b === null);
        return missing || (a === null ? 0 : sign * compare(a, b)) || (one < two ? -1 : 1);
      });
      this.order = found;
      this.stale = false;
      this.total = this.rows.size;
      this.matching = found.length;
      if (this.loaded) this.page = Math.max(0, Math.min(this.page, this.pages - 1));
      this.show();
    },
    show() {
      const start = this.page * this.pageRows;
      this.now = Date.now() / 1000;
      this.visible = this.order
        .slice(start, start + this.pageRows)
        .map((key) => this.rows.get(key))
        .filter(Boolean);
    },
    hold(held) {
      this.held = held;
    },
    // --- what the visitor does ---
    find(text) {
      this.query = text;
      this.page = 0;
      this.arrange();
      this.remember();
    },
    choose(field, value) {
      this.chosen[field] = value;
      this.find(this.query);
    },
    showAll() {
      for (const it of this.filters) this.chosen[it.key] = "";
      this.find("");
    },
    sortBy(sort) {
      this.sort = sort;
      this.page = 0;
      this.arrange();
      this.remember();
    },
    toggle(column) {
      this.sortBy(this.sort === this.first(column) ? this.second(column) : this.first(column));
    },
    // With Shift, all between the last that was clicked and this one.
    pick(event, key) {
      const on = event.target.checked;
      const keys = this.visible.map((it) => it[this.rowKey]);
      const ends = [keys.indexOf(key), event.shiftKey ? keys.indexOf(this.pickedLast) : -1].filter((it) => it >= 0);
      for (const it of keys.slice(Math.min(...ends), Math.max(...ends) + 1)) this.picked[on ? "add" : "delete"](it);
      this.pickedLast = key;
      this.tellPicked();
    },
    pickAll(on) {
      this.picked = new Set(on ? this.visible.map((it) => it[this.rowKey]) : []);
      this.tellPicked();
    },
    tellPicked() {
      this.$emit("pick", [...this.picked]);
    },
    // Enter in the search opens the first row that is found; arrows walk from there along the rows' links.
    links() {
      return [...this.$el.querySelectorAll("tbody .ps-is-link a")];
    },
    open() {
      this.links()[0]?.click();
    },
    walk(event, step) {
      const links = this.links();
      const at = links.indexOf(event.target);
      if (event.target.tagName === "SELECT" || (at < 0 && !event.target.matches("[data-ps-search]"))) return;
      event.preventDefault();
      const next = at < 0 ? (step > 0 ? links[0] : null) : links[at + step];
      (next ?? (at === 0 && step < 0 ? this.$el.querySelector("[data-ps-search]") : null))?.focus();
    },
    turn(page) {
      this.page = page;
      this.show();
      this.remember();
      this.$el.scrollIntoView({ block: "start" });
    },
    remember() {
      if (!this.urlState) return;
      const url = new URL(location.href);
      const keep = (name, value) => (value ? url.searchParams.set(name, value) : url.searchParams.delete(name));
      keep("q", this.query);
      for (const it of this.filters) keep(it.key, this.chosen[it.key]);
      keep("sort", this.sort === this.initialSort ? "" : this.sort);
      keep("page", this.page ? String(this.page + 1) : "");
      history.replaceState(history.state, "", url);
    },
    // --- words ---
    first(column) {
      return NUMBERS.has(column.kind) || column.kind === "badges" ? `-${column.key}` : column.key;
    },
    second(column) {
      const first = this.first(column);
      return first.startsWith("-") ? first.slice(1) : `-${first}`;
    },
    hint(column, sort) {
      const down = sort.startsWith("-");
      if (NUMBERS.has(column.kind) || column.sort) return down ? "↓" : "↑";
      return down ? "Z–A" : "A–Z";
    },
    ariaSort(column) {
      if (this.sort === column.key) return "ascending";
      return this.sort === `-${column.key}` ? "descending" : undefined;
    },
    cellClass(column) {
      return [`ps-is-${column.kind}`, NUMBERS.has(column.kind) && "ps-number", column.minor && "ps-minor"];
    },
    quiet(column, row) {
      const value = row[column.key];
      if (!NUMBERS.has(column.kind)) return "";
      if (!value) return "ps-zero";
      return column.alarm ? `ps-text-${column.alarm}` : "";
    },
    text(column, row) {
      const value = row[column.key];
      if (column.kind === "since") return NAMED.age(value === null || value === undefined ? null : Math.max(0, this.now - value));
      if (!NUMBERS.has(column.kind)) return value ?? "–";
      return value === null || value === undefined ? "–" : NAMED[column.kind](value);
    },
  },
};
