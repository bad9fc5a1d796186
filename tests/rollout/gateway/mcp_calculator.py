"""An MCP server with a calculator, on its standard input and output."""

from mcp.server.mcpserver import MCPServer

from tandemrl.tasks.generated import calculator as generated

server = MCPServer("sums")


@server.tool()
def calculator(expression: str) -> str:
    """Work out an expression of whole numbers."""
    return generated.calculator(expression)


if __name__ == "__main__":
    server.run("stdio")
