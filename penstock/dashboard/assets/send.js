// The form of a message that is to be sent. What is typed is judged here, as it is typed; the broker's side sends
// it (`sending.py`), and answers with a receipt or with what was wrong.
import { NAMED } from "/_penstock/words.js";

const CHECK_MS = 150;
const CHECK_NOW_MAX = 20000; // characters: no more than a key takes
const SAID_BYTES_MAX = 900000; // a page may say a MiB at once

export default {
  template: `
    <form class="ps-send" @submit.prevent="submit" @keydown.ctrl.enter="$refs.go.click()">
      <fieldset v-if="ways.length > 1" class="ps-ways">
        <legend class="ps-hidden">What to do with it</legend>
        <label v-for="it in ways" :key="it[0]"><input type="radio" :value="it[0]" v-model="way" name="way" />
          <span>{{ it[1] }}<small>{{ it[2] }}</small></span></label>
      </fieldset>
      <label v-show="isNew" :for="id + 'queue'">Queue</label>
      <input v-show="isNew" :id="id + 'queue'" v-model.trim="queue" class="ps-field" type="text" :required="isNew" maxlength="255" autocomplete="off"
             spellcheck="false" :list="id + 'queues'" :autofocus="!queueGiven" />
      <datalist :id="id + 'queues'"><option v-for="it in queues" :key="it" :value="it"></option></datalist>
      <div class="ps-bar">
        <label :for="id + 'value'">Payload</label>
        <div v-if="!kept" class="ps-choice ps-apart ps-local" role="group" aria-label="It is">
          <button v-for="(text, it) in KINDS" :key="it" type="button" :data-choice="it" :aria-pressed="String(kind === it)"
                  @click="chosen = it">{{ text }}</button>
        </div>
      </div>
      <p v-if="kept" :id="id + 'value'" class="ps-help">{{ kept }}</p>
      <textarea v-else :id="id + 'value'" ref="value" v-model="value" class="ps-field" rows="8" autocomplete="off" spellcheck="false"
                :aria-describedby="id + 'check'" :aria-invalid="String(wrong !== '')" :autofocus="queueGiven" @input="later"></textarea>
      <p v-if="!kept" :id="id + 'check'" class="ps-help" :class="{ 'ps-wrong': wrong }" role="status">{{ checked }}</p>
      <template v-if="isNew">
        <fieldset class="ps-send-headers ps-local">
          <legend>Headers</legend>
          <div v-for="(it, at) in headers" :key="it.key" class="ps-bar">
            <input v-model.trim="it.name" class="ps-field" :aria-label="'Name of header ' + (at + 1)" placeholder="name" autocomplete="off" />
            <input v-model="it.value" class="ps-field" :aria-label="'Value of header ' + (at + 1)" placeholder="value" autocomplete="off" />
            <button type="button" class="ps-button ps-quiet" :aria-label="'Remove header ' + (at + 1)" @click="headers.splice(at, 1)">✕</button>
          </div>
          <button type="button" class="ps-button" @click="addHeader()">Add a header</button>
        </fieldset>
        <div class="ps-bar">
          <label :for="id + 'delay'">Delay</label>
          <input :id="id + 'delay'" v-model="delay" class="ps-field" type="number" min="0" step="any" placeholder="none" />
          <span class="ps-help">s</span>
          <label :for="id + 'ttl'">Time to live</label>
          <input :id="id + 'ttl'" v-model="ttl" class="ps-field" type="number" min="1" step="1" placeholder="for ever" />
          <span class="ps-help">s</span>
        </div>
      </template>
      <p v-if="refusal" class="ps-wrong" role="alert">{{ refusal }}</p>
      <p v-if="receipt" class="ps-result" role="status">{{ receipt.text }} <a v-if="receipt.href" :href="receipt.href">{{ receipt.link }}</a></p>
      <div class="ps-actions">
        <button type="button" class="ps-button ps-quiet" @click="$emit('close')">{{ receipt ? "Close" : "Cancel" }}</button>
        <button ref="go" type="submit" class="ps-button ps-primary" :disabled="busy || wrong !== ''">{{ receipt ? again : action }}</button>
      </div>
    </form>
  `,
  props: {
    queueGiven: String,
    queues: Array,
    valueGiven: String,
    kept: String,
    headersGiven: Array,
    ways: Array,
    actions: Object,
  },
  emits: ["send", "close"],
  data() {
    return {
      KINDS: { text: "Text", json: "JSON" },
      queue: this.queueGiven,
      value: this.valueGiven,
      headers: this.headersGiven.map(([name, value], key) => ({ key, name, value })),
      delay: "",
      ttl: "",
      way: this.ways[0][0],
      chosen: "", // empty: by what it begins with
      json: "", // what keeps the payload from being JSON; null: nothing
      bytes: 0,
      busy: false,
      refusal: "",
      receipt: null,
    };
  },
  created() {
    this.id = `ps-send-${Math.random().toString(36).slice(2)}-`;
    this.check();
  },
  mounted() {
    this.$el.querySelector("[autofocus]")?.focus();
  },
  unmounted() {
    clearTimeout(this.timer);
  },
  computed: {
    isNew() {
      return this.way === "send";
    },
    kind() {
      return this.chosen || (/^\s*[[{]/.test(this.value) ? "json" : "text");
    },
    wrong() {
      return this.kept || this.kind === "text" || this.json === null ? "" : this.json;
    },
    checked() {
      const size = NAMED.size(this.bytes);
      if (this.wrong) return `${size}, no JSON: ${this.wrong}`;
      return `${size}, ${this.kind === "json" ? "JSON" : "text"}`;
    },
    action() {
      return this.actions[this.way];
    },
    again() {
      return this.isNew ? "Send another" : this.action;
    },
  },
  methods: {
    later() {
      this.receipt = null;
      clearTimeout(this.timer);
      if (this.value.length <= CHECK_NOW_MAX) this.check();
      else this.timer = setTimeout(() => this.check(), CHECK_MS);
    },
    check() {
      this.bytes = new TextEncoder().encode(this.value).length;
      try {
        JSON.parse(this.value);
        this.json = null;
      } catch (error) {
        this.json = error.message.replace(/^JSON\.parse: /, "");
      }
    },
    addHeader() {
      this.headers.push({ key: Math.random(), name: "", value: "" });
      this.$nextTick(() => [...this.$el.querySelectorAll(".ps-send-headers .ps-bar")].pop().querySelector("input").focus());
    },
    submit() {
      this.check();
      if (this.busy || this.wrong) return;
      this.refusal = "";
      this.receipt = null;
      const headers = this.headers.filter((it) => it.name || it.value).map((it) => [it.name, it.value]);
      const said = { queue: this.queue, value: this.kept ? null : this.value, headers, delay: String(this.delay), ttl: String(this.ttl), way: this.way };
      if (new TextEncoder().encode(JSON.stringify(said)).length > SAID_BYTES_MAX) {
        this.refusal = `This is more than a page can send, about ${NAMED.size(SAID_BYTES_MAX)}. Send it from a terminal: penstock send.`;
        return;
      }
      this.busy = true;
      this.$emit("send", said);
    },
    // --- what the broker's side calls ---
    done(receipt) {
      this.busy = false;
      this.receipt = receipt;
    },
    refused(text) {
      this.busy = false;
      this.refusal = text;
    },
  },
};
