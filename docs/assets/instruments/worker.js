// Runs slow computations outside the page. The name of the worker is the URL of the module whose functions it calls.
const module = import(self.name)

onmessage = async ({ data: [name, ...given] }) => postMessage(await (await module)[name](...given))
