//! Plots of what was measured, as SVG: lines over the number of pods, with the spread of each point.

use std::fmt::Write as _;

/// Size of the whole.
const WIDTH: f64 = 640.0;
const HEIGHT: f64 = 360.0;
/// What surrounds the field of the lines.
const LEFT: f64 = 70.0;
const RIGHT: f64 = 20.0;
const ABOVE: f64 = 50.0;
const BELOW: f64 = 50.0;
/// Colours that people who see few of them tell apart, on white and on black.
const COLOURS: [&str; 4] = ["#0072b2", "#d55e00", "#009e73", "#cc79a7"];
/// Steps of an axis, at most.
const STEPS: f64 = 6.0;

/// One value with its spread.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Point {
    pub(crate) x: f64,
    pub(crate) y: f64,
    /// The least and the greatest of what was measured.
    pub(crate) spread: (f64, f64),
}

/// One line.
#[derive(Clone, Debug)]
pub(crate) struct Line {
    pub(crate) name: String,
    pub(crate) points: Vec<Point>,
}

/// A plot.
#[derive(Clone, Debug)]
pub(crate) struct Plot {
    pub(crate) title: String,
    pub(crate) x: &'static str,
    pub(crate) lines: Vec<Line>,
}

impl Plot {
    /// The file's content. Both axes begin at zero, so that lengths are to be compared.
    pub(crate) fn svg(&self) -> String {
        let points = || self.lines.iter().flat_map(|line| &line.points);
        let (x_step, x_end) = axis(points().map(|p| p.x).fold(0.0, f64::max));
        let (y_step, y_end) = axis(points().map(|p| p.spread.1.max(p.y)).fold(0.0, f64::max));
        let at_x = |x: f64| LEFT + x / x_end * (WIDTH - LEFT - RIGHT);
        let at_y = |y: f64| HEIGHT - BELOW - y / y_end * (HEIGHT - ABOVE - BELOW);
        let mut svg = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {HEIGHT}\" font-family=\"sans-serif\" font-size=\"12\">\n\
             <rect width=\"{WIDTH}\" height=\"{HEIGHT}\" fill=\"white\"/>\n\
             <text x=\"{LEFT}\" y=\"20\" font-size=\"15\">{}</text>\n",
            escaped(&self.title)
        );
        for y in ticks(y_step, y_end) {
            let (at, right) = (at_y(y), WIDTH - RIGHT);
            let _ = writeln!(
                svg,
                "<line x1=\"{LEFT}\" y1=\"{at:.1}\" x2=\"{right}\" y2=\"{at:.1}\" stroke=\"#ddd\"/>\
                 <text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"end\">{}</text>",
                LEFT - 6.0,
                at + 4.0,
                number(y)
            );
        }
        for x in ticks(x_step, x_end) {
            let (at, below) = (at_x(x), HEIGHT - BELOW + 18.0);
            let _ = writeln!(svg, "<text x=\"{at:.1}\" y=\"{below}\" text-anchor=\"middle\">{}</text>", number(x));
        }
        let _ = writeln!(
            svg,
            "<text x=\"{:.1}\" y=\"{:.1}\" text-anchor=\"middle\">{}</text>",
            f64::midpoint(LEFT, WIDTH - RIGHT),
            HEIGHT - 12.0,
            escaped(self.x)
        );
        for (n, line) in self.lines.iter().enumerate() {
            let colour = COLOURS[n % COLOURS.len()];
            let path: Vec<String> = line.points.iter().map(|p| format!("{:.1},{:.1}", at_x(p.x), at_y(p.y))).collect();
            let _ = writeln!(
                svg,
                "<polyline points=\"{}\" fill=\"none\" stroke=\"{colour}\" stroke-width=\"2\"/>",
                path.join(" ")
            );
            for p in &line.points {
                let (x, y, low, high) = (at_x(p.x), at_y(p.y), at_y(p.spread.0), at_y(p.spread.1));
                let _ = writeln!(
                    svg,
                    "<line x1=\"{x:.1}\" y1=\"{low:.1}\" x2=\"{x:.1}\" y2=\"{high:.1}\" stroke=\"{colour}\"/>\
                     <circle cx=\"{x:.1}\" cy=\"{y:.1}\" r=\"3.5\" fill=\"{colour}\"><title>{}: {}</title></circle>",
                    escaped(&line.name),
                    number(p.y)
                );
            }
            let at = LEFT + n as f64 * 140.0;
            let _ = writeln!(
                svg,
                "<rect x=\"{at}\" y=\"30\" width=\"10\" height=\"10\" fill=\"{colour}\"/><text x=\"{}\" y=\"39\">{}</text>",
                at + 15.0,
                escaped(&line.name)
            );
        }
        svg.push_str("</svg>\n");
        svg
    }
}

/// The step of an axis from zero that holds this value, a round number, and the axis' end.
fn axis(most: f64) -> (f64, f64) {
    if most <= 0.0 || !most.is_finite() {
        return (1.0, 1.0);
    }
    let rough = most / STEPS;
    let power = 10f64.powf(rough.log10().floor());
    let step = [1.0, 2.0, 5.0, 10.0].map(|n| n * power).into_iter().find(|step| *step >= rough).unwrap_or(10.0 * power);
    (step, (most / step).ceil() * step)
}

fn ticks(step: f64, end: f64) -> impl Iterator<Item = f64> {
    (0..=(end / step).round() as u32).map(move |n| f64::from(n) * step)
}

/// Without digits that say nothing.
fn number(value: f64) -> String {
    let text = format!("{value:.2}");
    text.trim_end_matches('0').trim_end_matches('.').to_owned()
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn point(x: f64, y: f64) -> Point {
        Point { x, y, spread: (y * 0.9, y * 1.1) }
    }

    #[test]
    fn axes_are_round() {
        assert_eq!(axis(110.0), (20.0, 120.0));
        assert_eq!(axis(129_000.0), (50_000.0, 150_000.0));
        assert_eq!(axis(0.0), (1.0, 1.0));
        let (step, end) = axis(0.07);
        assert!((step - 0.02).abs() < 1e-9 && (end - 0.08).abs() < 1e-9, "{step} {end}");
        assert_eq!(ticks(20.0, 120.0).collect::<Vec<_>>(), [0.0, 20.0, 40.0, 60.0, 80.0, 100.0, 120.0]);
        assert_eq!([number(2.0), number(0.25), number(150.0)], ["2", "0.25", "150"]);
    }

    #[test]
    fn a_plot_has_its_points_where_they_belong() {
        let lines = vec![
            Line { name: "rubelet".into(), points: vec![point(10.0, 10.0), point(100.0, 20.0)] },
            Line { name: "a < b".into(), points: vec![point(10.0, 40.0), point(100.0, 80.0)] },
        ];
        let svg = Plot { title: "Memory & more".into(), x: "pods", lines }.svg();
        assert!(svg.contains("Memory &amp; more") && svg.contains("a &lt; b"));
        assert_eq!(svg.matches("<polyline").count(), 2);
        assert_eq!(svg.matches("<circle").count(), 4);
        // 88 is the greatest value, so the axis ends at 100, and 100 pods are its right end: the field is 260 high and 550 wide.
        assert!(svg.contains("points=\"125.0,284.0 620.0,258.0\""), "{svg}");
        assert!(svg.starts_with("<svg ") && svg.ends_with("</svg>\n"));
        // Each element is closed.
        for name in ["text", "circle", "title"] {
            assert_eq!(svg.matches(&format!("<{name}")).count(), svg.matches(&format!("</{name}>")).count(), "{name}");
        }
    }

    #[test]
    fn nothing_measured_is_an_empty_field() {
        let svg = Plot { title: "t".into(), x: "pods", lines: Vec::new() }.svg();
        assert!(!svg.contains("NaN") && !svg.contains("inf"));
    }
}
