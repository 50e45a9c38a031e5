// Search runs in a Worker, and browsers start none from a file://. There it runs in a hidden frame instead, which looks
// like a worker to both sides: messages go in by `postMessage` here, and come out by the one that the frame finds.
if (location.protocol === "file:")
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.append(this.frame)
      this.inside = this.frame.contentWindow
      this.inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = this.inside.document.createElement("script")
      script.src = url
      this.loaded = new Promise((done, failed) => { script.onload = done; script.onerror = failed })
      this.inside.document.body.append(script)
    }
    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
    terminate() {
      this.frame.remove()
    }
  }
