// Answers what takes long away from the page: its name is the module whose functions it calls.
const module = import(self.name)

onmessage = async ({ data: [name, ...given] }) => postMessage(await (await module)[name](...given))
