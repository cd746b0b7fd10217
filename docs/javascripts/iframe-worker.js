// The search of pages that were opened as files: a browser starts no worker from a file, so a hidden frame runs its script.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super()
      const frame = document.createElement("iframe")
      const start = `<script>window.postMessage = data => frameElement.dispatchEvent(new MessageEvent("message", {data}))<` + "/script>"
      frame.hidden = true
      frame.srcdoc = `${start}<script src="${url}"><` + "/script>"
      frame.addEventListener("message", event => this.dispatchEvent(new MessageEvent("message", { data: event.data })))
      this.frame = new Promise(resolve => frame.addEventListener("load", () => resolve(frame.contentWindow)))
      document.body.append(frame)
    }

    postMessage(data) {
      this.frame.then(window => window.dispatchEvent(new window.MessageEvent("message", { data })))
    }
  }
}
